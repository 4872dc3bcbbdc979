"""Files: whole or not there at all, one process at a time, and runs that continue. Nobody else writes one."""

from preimage.storage.elsewhere import Errand, Workers, current_workers, working_with
from preimage.storage.files import (
    BEFORE,
    SCHEMA,
    copy_hashed,
    dataframe,
    dumps,
    parse_json,
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
from preimage.storage.places import Place, is_remote, names_in, place_of
from preimage.storage.plans import differences, require_same
from preimage.storage.reading import KeptRun, read_records, read_run
from preimage.storage.records import processor, record
from preimage.storage.run import Run, inside
from preimage.storage.saved import Saved, decode

__all__ = [
    "BEFORE",
    "MANIFEST",
    "SCHEMA",
    "TENSORS",
    "Errand",
    "KeptRun",
    "Place",
    "Run",
    "Saved",
    "Workers",
    "copy_hashed",
    "current_workers",
    "dataframe",
    "decode",
    "differences",
    "dumps",
    "inside",
    "is_remote",
    "names_in",
    "parse_json",
    "place_of",
    "plain",
    "processor",
    "read_json",
    "read_manifest",
    "read_records",
    "read_run",
    "record",
    "replacing",
    "require_same",
    "seal",
    "sha256_document",
    "sha256_file",
    "unusable",
    "working_with",
    "write_bytes",
    "write_json",
    "write_table",
    "write_tensors",
    "write_text",
]
