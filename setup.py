"""Maps the four code folders to one importable package; everything else about the build is in pyproject.toml."""

from setuptools import find_packages, setup

PACKAGE_DIR = {
    "sparsejax": "sparsejax",
    "sparsejax.models": "models",
    "sparsejax.serving": "serving",
    "sparsejax.pallas_kernels": "pallas_kernels",
}

packages = []
for package, folder in PACKAGE_DIR.items():
    packages.append(package)
    packages.extend(f"{package}.{sub}" for sub in find_packages(folder))

setup(packages=packages, package_dir=PACKAGE_DIR)
