"""How far are the parameters from a collision?"""
