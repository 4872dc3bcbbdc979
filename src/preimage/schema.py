"""The version of everything preimage writes. A change of any format raises it."""

SCHEMA = "preimage/1"
