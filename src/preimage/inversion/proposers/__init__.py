"""Which token was it? Rankings of the vocabulary from states alone."""
