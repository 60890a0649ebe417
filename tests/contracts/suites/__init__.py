"""Contract suites: what every communicator, codec, schedule and server must do."""
