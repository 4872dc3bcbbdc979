"""What the theory of injectivity states, checked on a model: each check returns a report of verdicts."""
