"""Files: whole or not there at all, one process at a time, and runs that continue. Nobody else writes one."""

from preimage.storage.files import (
    BEFORE,
    SCHEMA,
    copy_hashed,
    dumps,
    plain,
    read_json,
    replacing,
    sha256_document,
    sha256_file,
    write_bytes,
    write_json,
    write_table,
    write_tensors,
    write_text,
)
from preimage.storage.manifest import MANIFEST, TENSORS, read_manifest, seal, unusable
from preimage.storage.plans import differences, require_same
from preimage.storage.records import processor, record
from preimage.storage.run import Run, inside
from preimage.storage.saved import Saved, decode

__all__ = [
    "BEFORE",
    "MANIFEST",
    "SCHEMA",
    "TENSORS",
    "Run",
    "Saved",
    "copy_hashed",
    "decode",
    "differences",
    "dumps",
    "inside",
    "plain",
    "processor",
    "read_json",
    "read_manifest",
    "record",
    "replacing",
    "require_same",
    "seal",
    "sha256_document",
    "sha256_file",
    "unusable",
    "write_bytes",
    "write_json",
    "write_table",
    "write_tensors",
    "write_text",
]
