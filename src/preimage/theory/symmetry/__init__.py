"""Do states stay where the weights move along the symmetry group?"""
