"""Drawn shapes to look at: how many are there, of which colour, where?"""
