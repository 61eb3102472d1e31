"""Checks of a machine: what a worker, a router and Ray need, each with a remedy. Importing this loads nothing heavy."""
