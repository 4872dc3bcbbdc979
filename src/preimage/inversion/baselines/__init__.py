"""What inversion is compared with."""
