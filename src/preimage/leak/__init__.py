"""What leaks: which prompts can be read from what a service stores or ships, what would stop it, at what price."""
