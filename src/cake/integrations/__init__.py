"""Adapters that let other packages run cake; each is imported by those who want it."""
