"""From states to prompts: the verifier, and the searches that ask it."""
