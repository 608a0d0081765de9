"""Turns a schedule's requests into changes of classes, and groups instances that share a class."""
