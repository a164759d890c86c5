"""The Flower app: two names for what is in upfl.flower."""
