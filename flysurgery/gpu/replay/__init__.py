"""Calls that launch again what they launched before."""
