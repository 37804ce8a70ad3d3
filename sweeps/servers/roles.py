"""Who may do what in the services' PostgreSQL: MLflow its own database, drivers add rows to the ledger.

The ledger's table belongs to `ledger_owner`, whom nobody needs once it is made. Drivers are `ledger_writer`:
they read rows and add some, and have no right to change, delete or truncate, to drop the table, or to switch
off its triggers, which refuse all of that a second time.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping

MLFLOW, OWNER, WRITER = "mlflow", "ledger_owner", "ledger_writer"
ADMIN, LEDGER = "dpgcl_admin", "ledger"


def new_passwords() -> dict[str, str]:
    """Return a random password for every role, made of characters that URLs take as they are."""
    return {role: secrets.token_urlsafe(24) for role in (ADMIN, MLFLOW, OWNER, WRITER)}


def role_statements(passwords: Mapping[str, str]) -> list[str]:
    """Return what makes the roles, in any database; each may be a statement of its own alone."""
    roles = [f"CREATE ROLE {name} LOGIN PASSWORD '{passwords[name]}'" for name in (MLFLOW, OWNER, WRITER)]
    databases = [f"CREATE DATABASE {MLFLOW} OWNER {MLFLOW}", f"CREATE DATABASE {LEDGER} OWNER {OWNER}"]
    alone = [
        statement
        for database, role in ((MLFLOW, MLFLOW), (LEDGER, WRITER))
        for statement in (
            f"REVOKE ALL ON DATABASE {database} FROM PUBLIC",
            f"GRANT CONNECT ON DATABASE {database} TO {role}",
        )
    ]
    return [*roles, *databases, *alone]


def ledger_statements() -> list[str]:
    """Return what the ledger's owner grants in its database, before the table is made and for good."""
    return [
        "REVOKE CREATE ON SCHEMA public FROM PUBLIC",
        f"GRANT CREATE ON SCHEMA public TO {OWNER}",
        f"ALTER DEFAULT PRIVILEGES FOR ROLE {OWNER} GRANT SELECT, INSERT ON TABLES TO {WRITER}",
    ]
