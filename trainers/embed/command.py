"""Embed images with an exported model; with a CLIP model also texts, and pairs of both.

    python -m trainers.embed --model FOLDER --images folder:/data/scans --to scans.parquet
    python -m trainers.embed --model FOLDER --images parquet:/data/scans.parquet --features projection
    python -m trainers.embed --model FOLDER --images csv:/data/pairs.csv --to pairs.npz
    python -m trainers.embed --model FOLDER --texts captions.txt --to captions.npz

Images are read by the rules of `trainers.data.loading` (a folder, an `.npz`, parquet files, your own pairs,
or a built-in data set), resized to the model's input and converted to its number of channels. If any image
cannot be read, the command fails and prints how many, so no row goes missing. `--features backbone` writes
the features that the scores use. `projection` writes the unit embeddings that the loss compares.

A CLIP model writes unit embeddings in the space that both towers share. For images with captions, it embeds
both sides. Rows with the same image are one record with one image embedding. `--texts` is a file with one
caption per line. An image encoder ignores the captions of pairs.

The output appears when it is complete. Until then, a private folder next to it holds the finished parts, and
the same command continues an interrupted run.

Embeddings of private data are private data themselves. The model's guarantee is about the records that it was
trained on. It covers the model, and not the data that the model is applied to.
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
    # Imported here, as they load torch, which the help does not need.
    from trainers.embed.embed_images import embed_with_image_encoder, embed_with_towers
    from trainers.embed.embedding_files import NOTE, NPZ, PARQUET, check_target
    from trainers.export.description import CLIP, read_description

    check_target(options.to, PARQUET, NPZ)
    description = read_description(options.model)
    run = embed_with_towers if description.kind == CLIP else embed_with_image_encoder
    run(options)
    print(f"the model: {description.promise}")
    print(f"note: {NOTE}")
    return 0
