"""Embeds images with an exported model; with a CLIP model also texts, and pairs of both.

    python -m trainers.embed --model FOLDER --images folder:/data/scans --to scans.parquet
    python -m trainers.embed --model FOLDER --images parquet:/data/scans.parquet --features projection
    python -m trainers.embed --model FOLDER --images csv:/data/pairs.csv --to pairs.npz
    python -m trainers.embed --model FOLDER --texts captions.txt --to captions.npz

Images are read by the rules of `trainers.data.loading` (a folder, an `.npz`, parquet files, pairs of one's
own, or a built-in data set), resized to the model's input and brought to its number of channels. What cannot
be read is refused as a whole, with how many there are; so no row goes missing. `--features backbone` gives
the features that the scores are computed from, `projection` the unit embeddings that the loss saw.

A CLIP model gives unit embeddings in the space of both towers, and of images with captions both sides. Rows
of pairs with one image are one record, and it has one embedding. `--texts` is a file with one caption per
line. An encoder of images takes the images of such pairs.

Embeddings of private data are private data themselves. The model's guarantee is about the records that
it was trained on; it covers the model, and nothing that the model is applied to.
"""

from __future__ import annotations

from collections.abc import Sequence

from dpgcl_core.command_line import run_command
from trainers.embed.options import EmbedOptions


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return 0.

    Raises:
      ConfigError, DataError, StorageError: an option, the images or the model are unusable.
    """
    options: EmbedOptions = run_command(
        EmbedOptions, prog="python -m trainers.embed", description=__doc__, arguments=arguments
    )
    from trainers.embed.embed_images import embed_alone, embed_with_towers
    from trainers.embed.embedding_files import (
        NOTE,
        NPZ,
        PARQUET,
        check_target,
    )  # here, with torch, which the help does not need
    from trainers.export.description import CLIP, read_description

    check_target(options.to, PARQUET, NPZ)
    description = read_description(options.model)
    run = embed_with_towers if description.kind == CLIP else embed_alone
    run(options)
    print(f"the model: {description.promise}")
    print(f"note: {NOTE}")
    return 0
