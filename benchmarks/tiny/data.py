# SPDX-License-Identifier: Apache-2.0
"""Training text, held-out prompts and the tokenizer, generated offline from fixed seeds.

- code: modules of the installed standard library (PSF licence), comments and long docstrings
  dropped and re-formatted by `ast.unparse`, plus generated modules (`text_code.py`);
- arithmetic: generated (`text_arithmetic.py`); chat: generated (`text_chat.py`).
"""

from __future__ import annotations

import ast
import re
import sysconfig
import warnings
from pathlib import Path
from random import Random

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from benchmarks.tiny import text_arithmetic, text_chat, text_code
from benchmarks.tiny.words import words

EOS, MASK = "<|endoftext|>", "<|mask|>"
VOCAB_SIZE = 1024
DOMAINS = ("code", "arithmetic", "chat")
# Share of the training tokens; "stdlib" and "code" together are the code domain.
MIX = {"stdlib": 0.38, "code": 0.17, "arithmetic": 0.22, "chat": 0.23}
PROMPTS_PER_DOMAIN = 30
TRAIN_SEED, PROMPT_SEED = 1, 2

TRAIN_MODULES = words("""
 abc aifc argparse ast asynchat asyncore base64 bdb bisect bz2 calendar cgi cmd code codecs codeop
colorsys compileall configparser contextlib copy csv dataclasses difflib dis doctest filecmp
fileinput fnmatch fractions ftplib functools genericpath getopt getpass gettext glob gzip hashlib
heapq hmac imaplib imghdr inspect io ipaddress keyword linecache locale lzma mailbox mimetypes
netrc nntplib numbers operator optparse os pathlib pdb pickle pipes pkgutil platform plistlib
poplib posixpath pprint profile pstats pyclbr pydoc queue random reprlib rlcompleter runpy sched
secrets selectors shelve shlex shutil signal site smtplib sndhdr socket socketserver statistics
string stringprep subprocess sunau symtable sysconfig tabnanny tarfile telnetlib tempfile this
threading timeit token tokenize trace traceback tracemalloc types typing uuid warnings wave
weakref webbrowser xdrlib zipapp zipfile zipimport _pyio _collections_abc _weakrefset asyncio/*
collections/* concurrent/futures/* ctypes/* email/* html/* http/* importlib/* json/* logging/*
multiprocessing/* sqlite3/* tkinter/* tomllib/* unittest/* urllib/* venv/* wsgiref/* xml/dom/*
xml/etree/* xml/sax/* xmlrpc/* zoneinfo/* test/test_argparse test/test_array test/test_bool
test/test_calendar test/test_cmd test/test_collections test/test_configparser test/test_copy
test/test_csv test/test_dataclasses test/test_deque test/test_dict test/test_enum test/test_float
test/test_fractions test/test_ftplib test/test_functools test/test_heapq test/test_hmac
test/test_httplib test/test_ipaddress test/test_int test/test_itertools test/test_list
test/test_logging test/test_mailbox test/test_math test/test_minidom test/test_operator
test/test_os test/test_pathlib test/test_random test/test_set test/test_shutil test/test_smtplib
test/test_statistics test/test_string test/test_textwrap test/test_threading test/test_tuple
test/test_types test/test_typing test/test_urllib test/test_urlparse test/test_uuid
test/test_weakref test/test_zipfile
""")
HELD_OUT_MODULES = words("""
 datetime enum textwrap graphlib stat modulefinder chunk crypt mailcap nturl2path ntpath opcode
pickletools py_compile quopri sre_compile smtpd uu cProfile copyreg test/test_bisect
test/test_complex test/test_datetime test/test_decimal test/test_defaultdict test/test_fileinput
test/test_graphlib test/test_netrc test/test_numeric_tower test/test_ordered_dict test/test_queue
test/test_range test/test_sched test/test_slice test/test_struct test/test_tempfile test/test_time
test/test_userlist
""")


class _Tidy(ast.NodeTransformer):
    """Drop docstrings longer than a line, because this model should not learn prose."""

    def visit(self, node: ast.AST) -> ast.AST:
        self.generic_visit(node)
        body = getattr(node, "body", None)
        if (
            isinstance(body, list)
            and body
            and isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        ):
            first = body[0]
            text = first.value if isinstance(first, ast.Expr) else None
            if isinstance(text, ast.Constant) and "\n" in str(text.value):
                body[0:1] = [] if len(body) > 1 else [ast.Pass()]
        return node


def stdlib_modules(names: list[str]) -> dict[str, str]:
    """Cleaned source by module, without modules that this Python does not have."""
    root = Path(sysconfig.get_paths()["stdlib"])
    out: dict[str, str] = {}
    for name in names:
        paths = sorted(root.glob(name + ".py"))
        for path in paths:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    tree = ast.parse(path.read_text(encoding="utf-8"))
                out[path.relative_to(root).as_posix()] = ast.unparse(_Tidy().visit(tree)) + "\n"
            except (SyntaxError, UnicodeDecodeError):
                continue
    return out


def train_tokenizer(texts: list[str], folder: Path) -> PreTrainedTokenizerFast:
    """Byte-level BPE with single digits, so that arithmetic can be learnt."""
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    ])  # fmt: skip
    tok.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[EOS, MASK],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tok.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tok, eos_token=EOS, pad_token=EOS, model_max_length=4096
    )
    # Chat text is plain: no special tokens, so that `prompts.jsonl` needs no template.
    fast.chat_template = (
        "{% for m in messages %}{{ 'User: ' if m['role'] == 'user' else 'Assistant: ' }}"
        "{{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
    )
    fast.save_pretrained(folder)
    return fast


def generate_texts(domain: str, count: int) -> list[str]:
    """Training documents of a generated domain; the seed differs from the prompts' seed."""
    return generate_documents(domain, count, Random(f"{TRAIN_SEED}-{domain}"))


def generate_documents(domain: str, count: int, rng: Random) -> list[str]:
    """Documents of a generated domain."""
    make = {"code": text_code, "arithmetic": text_arithmetic, "chat": text_chat}[domain].document
    return [make(rng) for _ in range(count)]


def encode(tok: PreTrainedTokenizerFast, texts: list[str]) -> Tensor:
    """All texts concatenated, each followed by the end-of-text token: [N] int64."""
    eos = tok.eos_token_id
    flat = [t for ids in tok(texts)["input_ids"] for t in (*ids, eos)]
    return torch.tensor(flat, dtype=torch.int64)


class Corpus:
    """Token streams per source, mixed by `MIX`."""

    def __init__(self, streams: dict[str, Tensor]) -> None:
        self.streams = streams

    def batch(self, rows: int, length: int, generator: torch.Generator) -> Tensor:
        """[rows, length + 1] random windows; sources are drawn by their share."""
        names = list(MIX)
        shares = torch.tensor([MIX[n] for n in names])
        picks = torch.multinomial(shares, rows, replacement=True, generator=generator)
        out = []
        for pick in picks.tolist():
            stream = self.streams[names[pick]]
            at = int(torch.randint(len(stream) - length - 1, (1,), generator=generator))
            out.append(stream[at : at + length + 1])
        return torch.stack(out)


def _definitions(sources: dict[str, str]) -> list[tuple[str, int]]:
    """(module text, offset) of every function and class in the sources."""
    starts = re.compile(r"^ {0,4}(?:def|class) ", re.MULTILINE)
    return [(text, m.start()) for text in sources.values() for m in starts.finditer(text)]


def openings(domain: str, count: int, rng: Random) -> list[str]:
    """Texts that start at a document, function or class, for the target to continue."""
    if domain == "stdlib":
        spots = _definitions(stdlib_modules(TRAIN_MODULES))
        return [text[at : at + 600] for text, at in (rng.choice(spots) for _ in range(count))]
    return generate_documents(domain, count, rng)


def held_out_prompts(tok: PreTrainedTokenizerFast, train_texts: list[str]) -> list[dict[str, str]]:
    """30 prompts per domain, 20 to 120 tokens, none of them part of a training text.

    Code: 15 openings of functions and classes of held-out modules, 15 of generated code.
    """
    rng = Random(PROMPT_SEED)
    spots = _definitions(stdlib_modules(HELD_OUT_MODULES))
    seen = "\0".join(train_texts)

    def stdlib_prompt() -> str:
        text, at = rng.choice(spots)
        lines = text[at : at + 900].split("\n")
        # No newline at the end: the tokenizer joins it with the indent that follows.
        return "\n".join(lines[: rng.randint(3, 6)]).rstrip()

    makers = {
        "code-stdlib": stdlib_prompt,
        "code-made": lambda: text_code.prompt(rng),
        "arithmetic": lambda: text_arithmetic.prompt(rng),
        "chat": lambda: text_chat.prompt(rng),
    }
    rows: list[dict[str, str]] = []
    for name, make in makers.items():
        domain = name.split("-")[0]
        want = PROMPTS_PER_DOMAIN // (2 if domain == "code" else 1)
        texts: list[str] = []
        while len(texts) < want:
            text = make()
            if 20 <= len(tok(text)["input_ids"]) <= 120 and text not in seen and text not in texts:
                texts.append(text)
        rows += [
            {"id": f"{name}-{i:02d}", "domain": domain, "prompt": t} for i, t in enumerate(texts)
        ]
    return rows
