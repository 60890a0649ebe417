"""What ranks must have in common at an exchange: one file for each agreement."""
