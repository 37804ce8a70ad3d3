"""Addresses in messages: one rule for the parts of a URL, a path or a connection string that may be shown.

An address may carry a secret almost anywhere: before the `@`, in the query, behind a slash or `#` that was
not escaped, in an invalid port. So this module does not search for secrets to remove them. It shows the parts
that a strict grammar knows to be harmless. If an address does not fit the grammar, only its scheme is shown.

Proposition. The text that `masked` returns for an address with `://` contains only these parts of it: the
scheme; hosts and ports that end the authority; for a database the user's name; path characters without
`@ = ; & :` (in a bucket, `=` is one of them); values of parameters in `_HARMLESS`. *Why*: an `@` behind the
first `/`, `?` or `#` hides everything, so a secret that was not escaped hides the host, too. Without such
an `@`, a secret can only be before the last `@` of the authority, and that part is dropped. The remaining
secrets cannot be distinguished from parts of an address without a secret: a password of digits in the place
of a port, or a folder's name.

The text of other libraries' exceptions is shown if it contains no hidden piece (`text_of_error`).
`DpgclError` and everything printed, tagged and written passes through `masked_text`, which finds the
addresses in a text. Code that has an address uses `masked`.
"""

from __future__ import annotations

import ctypes
import re
import sys
from contextlib import suppress
from pathlib import Path
from urllib.parse import unquote

HIDDEN = "***"
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):(.*)", re.DOTALL)
_DATABASES = frozenset(("postgresql", "postgres", "mysql", "mssql", "sqlite"))
_FILES = frozenset(("sqlite", "file"))
_OWN_FILES = frozenset(
    ("npz", "parquet", "hf", "folder", "csv", "webdataset", "shards", "shapes", "procedural")
)
"""The prefixes of the path of a user's own data set (`trainers.data.loading`)."""
_HOST = r"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]*)(?::\d{1,5})?"
_HOSTS = re.compile(rf"{_HOST}(?:,{_HOST})*")
_USER = re.compile(r"[\w.-]+")
_HARMLESS = frozenset(
    [
        "application_name",
        "charset",
        "connect_timeout",
        "dbname",
        "driver",
        "host",
        "mode",
        "port",
        "sslmode",
        "target_session_attrs",
        "timeout",
        "uri",
        "user",
    ]
)
_VALUE = re.compile(r"[\w./+-]*")
_SCHEMA = re.compile(r"-c ?search_path=[\w,]+")
# These names are shown, so that a reader sees which parameter was hidden. Any other name may be a secret.
_NAMED = frozenset(("password", "passwd", "pwd", "token", "key", "secret", "sslpassword", "access_token"))
_KEYWORD = r"[\w-]*(?:password|passwd|pwd|passphrase|token|secret|(?:api|access|account)[_-]?key|signature)"
_KEY_AND_VALUE = re.compile(
    rf"(?i)(?<![\w-])({_KEYWORD})(\s*=\s*)(?!\*\*\*)('(?:\\.|[^'])*'|\"(?:\\.|[^\"])*\"|\S+)"
)
_CONNECTION_STRING = re.compile(
    rf"(?i)(?:^|[\s;&?])(?:{_KEYWORD}|host|hostaddr|user|uid|dbname|port|service|server|driver)\s*="
)
_IN_TEXT = re.compile(r"(?<![A-Za-z0-9+.-])[A-Za-z][A-Za-z0-9+.-]*:[/\\]+\S*")
_BARE = re.compile(r"(?<![\w:/.-])([\w.-]+):(?!/)[^\s@]*@\S*")
_PLAIN_PATH = re.compile(
    rf"(?:(?:{'|'.join(sorted(_OWN_FILES))}):)?(?:/|\.\.?/|~)(?!.*(?:://|:[^/]*@))[^?&;\s]*"
)
_TRAILING = ".,;:!)]}'\"`>…"


def masked(address: str) -> str:
    """Return an address, a path or a connection string without secrets, for a message.

    >>> masked("https://me:pa/ss@tracking.example/mlflow"), masked("https://me:secret@tracking.example/mlflow")
    ('https://***', 'https://***@tracking.example/mlflow')
    >>> masked("postgresql://me:secret@db:5432/ledger?sslmode=require&password=p")
    'postgresql://me:***@db:5432/ledger?sslmode=require&password=***'
    >>> masked("postgresql:/me:secret@db"), masked("host=db password=secret"), masked("/data/ledger.db")
    ('postgresql:***', '***', '/data/ledger.db')
    """
    match = _SCHEME.fullmatch(address)
    if match is None:
        return _mask_without_scheme(address)
    scheme, body = match[1], match[2]
    if scheme.lower() in _OWN_FILES:
        return f"{scheme}:{_mask_without_scheme(body) if body.startswith(('/', '.', '~')) else masked(body)}"
    if not body.startswith("//"):
        is_port = body.isascii() and body.isdecimal() and len(body) <= 5  # host:port
        return address if is_port else f"{scheme}:{HIDDEN}"
    return f"{scheme}://{_mask_after_slashes(scheme.lower().partition('+')[0], body[2:])}"


def masked_text(text: str) -> str:
    """Return a text in which every address is masked, and so are the values of passwords and the like.

    >>> masked_text("no answer from http://127.0.0.1:5000, and 'https://a:b@host/x?y=z' needs token=abc")
    "no answer from http://127.0.0.1:5000, and 'https://***@host/x?***' needs token=***"
    """

    def mask_address(match: re.Match[str]) -> str:
        token = match[0].rstrip(_TRAILING)
        scheme, _, body = token.partition("://")
        body = re.sub(r":\d{1,5}(?=[/,]|$)", "", body)
        is_plain = "://" in token and not re.search(r"[@?#%=&;:\\]", body)
        is_own = scheme.partition(":")[0].lower() in _OWN_FILES
        plain = is_plain or (is_own and "@" not in token)
        return token + match[0][len(token) :] if plain else masked(token) + match[0][len(token) :]

    def mask_bare(match: re.Match[str]) -> str:
        return match[0] if match[1].lower() in _OWN_FILES else f"{match[1]}:{HIDDEN}"

    text = re.sub(r"s3:/(?!/)", "s3://", text)  # pathlib omits a slash
    text = _KEY_AND_VALUE.sub(lambda match: f"{match[1]}{match[2]}{HIDDEN}", text)
    # `_BARE` is also applied first: the second colon of `me:password:/@host` looks like the end of a scheme.
    return _BARE.sub(mask_bare, _IN_TEXT.sub(mask_address, _BARE.sub(mask_bare, text)))


def has_secret(address: str) -> bool:
    """Return whether any part of an address must not be shown."""
    return masked(address) != address


def text_of_error(error: BaseException, address: str, part: str | None = None) -> str:
    """Return a library's error message on one line, masked, or only the error's class if it shows a secret.

    A library may split an address with a password in the wrong place, and quote half of the password as an
    invalid port. Masking whole addresses is therefore not enough.

    Args:
      error: the error that the library raised.
      address: the address that the library received.
      part: the text to return in place of the whole message, for example an excerpt.
    """
    text = " ".join((str(error) if part is None else part).split())
    if not text or any(_occurs(piece, text) for piece in _hidden_pieces(address)):
        return f"{type(error).__name__}" + (
            " (its message repeats the address and is hidden)" if text else ""
        )
    return masked_text(text)


def hide_arguments() -> bool:
    """Overwrite the secrets in the command line that other users see (`ps`); return whether there were any.

    It works if the kernel reports the memory address of the arguments (Linux). The shell's history, and
    anyone who ran `ps` before, still have the secrets. `sys.argv` does not change.
    """
    secrets = [secret for argument in sys.argv[1:] if (secret := _secret_argument(argument))]
    with suppress(OSError, ValueError, IndexError):
        if secrets and sys.platform == "linux":
            _overwrite(secrets)
    return bool(secrets)


def _mask_without_scheme(text: str) -> str:
    """Return a path, or another address without a scheme, masked."""
    if text.startswith(("/", "./", "../", "~")):
        hides = bool(re.search(r":[^/]*@|://", text) or _KEY_AND_VALUE.search(text))
    else:
        hides = "@" in text or _CONNECTION_STRING.search(text) is not None
    return HIDDEN if hides else text


def _mask_after_slashes(backend: str, body: str) -> str:
    """Return the part of a URL that follows `://`, masked."""
    if backend in _FILES and body.startswith("/"):
        path, mark, query = body.partition("?")
        return _mask_without_scheme(path) + (mark and "?" + _mask_query(query))
    end = next((i for i, character in enumerate(body) if character in "/?#\\"), len(body))
    authority, tail = body[:end], body[end:]
    user, at, hosts = authority.rpartition("@")
    if "@" in unquote(unquote(tail)) or not _HOSTS.fullmatch(hosts):
        return HIDDEN
    tail, fragment, _ = tail.partition("#")
    path, mark, query = tail.partition("?")
    secret_parts = r"[;&:\\\s]" if backend == "s3" else r"[=;&:\\\s]"  # date=2026 is part of many keys
    if re.search(secret_parts, unquote(unquote(path))):
        path = f"/{HIDDEN}"
    return (
        (_mask_user(user, is_database=backend in _DATABASES) if at else "")
        + hosts
        + path
        + (mark and "?" + _mask_query(query))
        + (fragment and fragment + HIDDEN)
    )


def _mask_user(user: str, *, is_database: bool) -> str:
    name, colon, _ = user.partition(":")
    if not is_database or not _USER.fullmatch(name):
        return f"{HIDDEN}@"
    return f"{name}{colon}{HIDDEN if colon else ''}@"


def _mask_query(query: str) -> str:
    def mask_parameter(parameter: str) -> str:
        name, equals, value = parameter.partition("=")
        key, text = name.lower(), unquote(value)
        if equals and key in _HARMLESS and _VALUE.fullmatch(text):
            return parameter
        if equals and key == "options" and _SCHEMA.fullmatch(text):
            return parameter
        return f"{name}={HIDDEN}" if equals and name.lower() in _NAMED else HIDDEN

    return "&".join(mask_parameter(parameter) for parameter in re.split("[&;]", query)) if query else ""


_DELIMITERS = re.compile(r"[/@:?#%&=;,\s\\'\"]+")


def _hidden_pieces(address: str) -> set[str]:
    """Return every part of an address, as written and URL-decoded, that its masked form does not show."""
    visible_pieces = set(_DELIMITERS.split(masked(address)))
    known = {"", *visible_pieces, *_NAMED, *_HARMLESS}
    return {
        piece
        for form in (address, unquote(address))
        for piece in _DELIMITERS.split(form)
        if piece not in known
    }


def _occurs(piece: str, text: str) -> bool:
    """Return whether a piece occurs in a text; a short piece must be a whole word there."""
    return piece in text if len(piece) > 3 else piece in re.split(r"[^\w]+", text)


def _secret_argument(argument: str) -> str:
    """Return the value of a command-line argument if it contains a secret, else ""."""
    value = argument.partition("=")[2] if argument.startswith("--") else argument
    if _PLAIN_PATH.fullmatch(value):
        return ""
    is_address = "://" in value or _CONNECTION_STRING.search(value) is not None or ":/" in value
    return value if (is_address and has_secret(value)) or masked_text(value) != value else ""


def _overwrite(secrets: list[str]) -> None:
    """Overwrite the secrets with asterisks in the memory that `/proc/self/cmdline` shows (Linux)."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end, 48 and 49 in proc(5)
    command_line = Path("/proc/self/cmdline").read_bytes()
    if not 0 < start < end or end - start != len(command_line):
        return
    for secret in sorted(secrets, key=len, reverse=True):
        value = secret.encode(sys.getfilesystemencoding(), "surrogateescape")
        for match in re.finditer(rb"(?:(?<=\0)|(?<==))" + re.escape(value) + rb"(?=\0)", command_line):
            ctypes.memset(start + match.start(), ord("*"), len(value))
