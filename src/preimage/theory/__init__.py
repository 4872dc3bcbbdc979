"""What the papers prove, checked by numbers on a given model."""
