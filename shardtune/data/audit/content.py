"""What makes two encoded rows the same: their tokens, their images by content, and all other fields."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import numpy as np
import xxhash

from shardtune.data.cache.blocks import TokenBlock
from shardtune.data.cache.dataset import TokenDataset
from shardtune.data.images.images import DIGESTS, IMAGE_FIELDS, ImageKind, from_fields


def field_keys(rows: TokenDataset, start: int, count: int) -> np.ndarray:
    """uint64 [count]: a hash of what the rows from `start` on have besides tokens; 0 for rows that have nothing else.

    An image counts as its file's bytes, not by its name; a video's frame by file and time.
    """
    keys = np.zeros(count, np.uint64)
    if rows.fields:
        for place in range(count):
            keys[place] = _fields_key(rows.row(start + place).fields)
    return keys


def _fields_key(fields: Mapping[str, np.ndarray]) -> int:
    digest, is_empty = xxhash.xxh3_64(), True
    if DIGESTS in fields:
        for image in from_fields(fields):
            is_empty = False
            known = image.kind == ImageKind.FILE and image.digest
            digest.update(image.digest.to_bytes(8, "little", signed=True) if known else image.content)
    for name in sorted(fields.keys() - IMAGE_FIELDS):
        is_empty = False
        value = np.ascontiguousarray(fields[name])
        digest.update(f"{name} {value.dtype} {value.shape}".encode())
        digest.update(value.tobytes())
    return 0 if is_empty else digest.intdigest()


def content_keys(block: TokenBlock, keys: np.ndarray) -> np.ndarray:
    """uint64 [rows]: the hash of each row's tokens and of what else it has.

    Args:
        block: the rows.
        keys: of the same rows, from `field_keys`.
    """
    data, ends = memoryview(block.tokens.tobytes()), (block.offsets * block.tokens.itemsize).tolist()
    of_tokens = [xxhash.xxh3_64_intdigest(data[start:stop]) for start, stop in pairwise(ends)]
    with np.errstate(over="ignore"):
        return np.array(of_tokens, np.uint64) + keys * np.uint64(0x9E3779B97F4A7C15)


def repeats(keys: np.ndarray) -> np.ndarray:
    """int64 [rows]: for each row the first one that has the same key, itself if there is none before it."""
    order = np.argsort(keys, kind="stable")
    new = np.ones(len(keys), bool)
    new[1:] = keys[order][1:] != keys[order][:-1]
    # Keys c a c a in order are a a c c, rows 1 3 0 2; groups start at the places 0 and 2: 1 1 0 0 in that order.
    starts = order[new][np.cumsum(new) - 1]
    first = np.empty(len(keys), np.int64)
    first[order] = starts
    return first
