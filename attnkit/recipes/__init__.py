"""Whole tasks on real data, from text to a trained and measured model."""
