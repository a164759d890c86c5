"""Personalizers, one file each, and the contract they share (`base`)."""
