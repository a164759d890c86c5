"""Figures and tables, made from run folders alone."""
