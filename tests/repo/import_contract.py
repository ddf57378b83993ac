"""An import-linter contract: some modules may import only what is listed.

import-linter's own contracts forbid imports; a list of what is allowed stays right when modules are added.
"""

from __future__ import annotations

import sys

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, fields, output


class OnlyImports(Contract):
    """Direct imports of `source_modules` must be of `allowed_modules`, of themselves or of the standard library.

    A dotted name includes everything below it; the bare name of the root package means its `__init__` alone. A source
    that doesn't exist breaks the contract, so that a rename can't switch a rule off.
    """

    source_modules = fields.ListField(subfield=fields.StringField())
    except_modules = fields.ListField(subfield=fields.StringField(), required=False)
    allowed_modules = fields.ListField(subfield=fields.StringField())

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        """Lists every import that is not allowed."""
        sources: list[str] = self.source_modules  # pyright: ignore[reportAssignmentType]
        exceptions: list[str] = self.except_modules or []  # pyright: ignore[reportAssignmentType]
        allowed: list[str] = self.allowed_modules  # pyright: ignore[reportAssignmentType]
        missing = [name for name in sources if name not in graph.modules]
        broken = []
        for module in sorted(graph.modules):
            if not _covered(module, sources) or _covered(module, exceptions):
                continue
            for imported in sorted(graph.find_modules_directly_imported_by(module)):
                if imported.split(".")[0] in sys.stdlib_module_names or _covered(imported, allowed):
                    continue
                if _covered(imported, sources) and not _covered(imported, exceptions):
                    continue
                details = graph.get_import_details(importer=module, imported=imported)
                broken.append((module, imported, details[0]["line_number"]))
        return ContractCheck(kept=not broken and not missing, metadata={"broken": broken, "missing": missing})

    def render_broken_contract(self, check: ContractCheck) -> None:
        """Prints one line for every finding."""
        for name in check.metadata["missing"]:
            output.print_error(f"{name} does not exist; correct the contract")
        for module, imported, line in check.metadata["broken"]:
            output.print_error(f"{module} (line {line}) may not import {imported}")


def _covered(module: str, names: list[str]) -> bool:
    return any(module == name or ("." in name and module.startswith(f"{name}.")) for name in names)
