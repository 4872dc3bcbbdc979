"""Hostile files: what is read from strangers ends in success or in one short PreimageError."""
