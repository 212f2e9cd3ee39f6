"""Three hospitals, as a Flower app: `client` runs at each, `server` between them."""
