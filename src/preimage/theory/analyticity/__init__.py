"""Is every block real-analytic in its parameters?"""
