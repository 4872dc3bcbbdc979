"""Which prompts do almost all parameters separate, and which none?"""
