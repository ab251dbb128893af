"""Sections of studies: each asks one question of whatever variants a study gives it."""
