"""Fields: attention maps as a turbulent field."""
