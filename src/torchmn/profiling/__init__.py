"""Where the time of a step goes: the record that each run keeps, and profiles of chosen steps."""
