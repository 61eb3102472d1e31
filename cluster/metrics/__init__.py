"""Prometheus metrics: counted as plain numbers while serving, put into families when somebody asks."""
