"""Is any training step singular?"""
