"""Constraints on a model's text (JSON Schema, regular expressions, grammars, choices, tags) as masks over its tokens.

Knows no wire schema and no engine: a constraint goes in, what comes out follows a text token by token. Nothing is ever
loosened: what cannot be enforced as it is written is refused.
"""

from batchline.text.grammars.compiler import GrammarCompiler
from batchline.text.grammars.grammar import NOTHING_ELSE, Constraint, ConstraintKind, Preamble, Surroundings
from batchline.text.grammars.matcher import CompiledGrammar, GrammarMatcher

__all__ = [
    "NOTHING_ELSE",
    "CompiledGrammar",
    "Constraint",
    "ConstraintKind",
    "GrammarCompiler",
    "GrammarMatcher",
    "Preamble",
    "Surroundings",
]
