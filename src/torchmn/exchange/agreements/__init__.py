"""Agreements: facts that ranks compare, or tell each other, in the footer of an exchange."""
