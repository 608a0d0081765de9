"""Puts `rules/` into the package as `slapo_rewrite.rules`; everything else is in pyproject.toml."""

from setuptools import find_packages, setup

RULES = [package for package in find_packages() if package.split(".")[0] == "rules"]

setup(
    packages=find_packages(include=["slapo_rewrite", "slapo_rewrite.*"])
    + [f"slapo_rewrite.{package}" for package in RULES],
    package_dir={"slapo_rewrite.rules": "rules"},
)
