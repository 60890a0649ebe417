"""What ranks must have in common at an exchange, and what they tell each other there."""
