#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Trains the small tokenizers of tests/golden/tokenizers and writes the cases that Hugging Face's
`tokenizers` (PyPI) gives for them. usage: make_tokenizers.py [NAME...]

Run by hand; training text is this tree's own. The files differ from run to run as the tree does, so
they are made again only when a kind is added.
"""
import glob
import json
import os
import random
import sys

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers
from tokenizers import pre_tokenizers, processors, trainers

from differential_tokenizers import Generator, unknown_characters

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.join(HERE, "..", "..")
VOCAB_SIZE = 1000
NUM_CASES = 250
MAX_TEXT = 90

LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
          r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
TEKKEN = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
          r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
          r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")
# One expression with most of what is translated: "{1,3}+", \s and \S in sets, \u, \x, \d, \P.
MIXED = (r"(?i:'[sdmt]|'ll|'ve|'re)|[^\S\n]+(?=\p{Han})|\p{Nd}{1,2}+"
         r"|[\u4e00-\u9fa5\x{3040}-\x{30ff}]+|(?<=[.!?])\s+|[\p{L}\p{M}]++|\d|\P{L}\s*?")
MARK = "\u2581"


def training_text():
    """The tree's own documents and code, and the Qwen2.5 cases for other scripts."""
    texts = []
    for pattern in ("*.md", "src/*/*.c", "include/*.h", "tests/golden/*.py"):
        for path in sorted(glob.glob(os.path.join(ROOT, pattern))):
            with open(path, encoding="utf-8") as file:
                texts.append(file.read())
    with open(os.path.join(HERE, "tokenizers", "qwen2.5", "cases.jsonl"), encoding="utf-8") as file:
        texts += [json.loads(line)["text"] for line in file]
    return texts


def train(tokenizer, specials, **options):
    trainer = trainers.BpeTrainer(vocab_size=VOCAB_SIZE, show_progress=False,
                                  special_tokens=specials, **options)
    tokenizer.train_from_iterator(training_text(), trainer)
    return tokenizer


def byte_level_options():
    return {"initial_alphabet": sorted(pre_tokenizers.ByteLevel.alphabet())}


def sentencepiece_options():
    return {"limit_alphabet": 200}


def byte_tokens():
    return [f"<0x{byte:02X}>" for byte in range(256)]


def gpt2():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.decoder = decoders.ByteLevel()
    train(tokenizer, ["<|endoftext|>"], **byte_level_options())
    tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True, special=True)])
    tokenizer.add_tokens([AddedToken("<right>", rstrip=True), AddedToken("word", single_word=True),
                          AddedToken("  ", normalized=False), AddedToken("<both>", lstrip=True,
                                                                        rstrip=True)])
    return tokenizer


def llama3():
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(LLAMA3), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    train(tokenizer, [], **byte_level_options())
    tokenizer.add_special_tokens(["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"])
    tokenizer.post_processor = processors.Sequence([
        processors.ByteLevel(trim_offsets=True),
        processors.TemplateProcessing(
            single="<|begin_of_text|> $A", pair="<|begin_of_text|> $A <|begin_of_text|>:1 $B:1",
            special_tokens=[("<|begin_of_text|>",
                             tokenizer.token_to_id("<|begin_of_text|>"))])])
    return drop_merges(tokenizer)


def drop_merges(tokenizer):
    """Makes words that no merge leads to: every third merge whose token no other one needs goes."""
    description = json.loads(tokenizer.to_str())
    merges = description["model"]["merges"]
    parts = {part for merge in merges for part in merge}
    leaves = [merge for merge in merges if "".join(merge) not in parts]
    dropped = {tuple(merge) for merge in leaves[::3]}
    description["model"]["merges"] = [merge for merge in merges if tuple(merge) not in dropped]
    return Tokenizer.from_str(json.dumps(description))


def add_template(tokenizer):
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s>:1 $B:1", special_tokens=[("<s>", 1)])


def sentencepiece(normalizer, pre_tokenizer, decoder):
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if pre_tokenizer is not None:
        tokenizer.pre_tokenizer = pre_tokenizer
    # Trained on words, as SentencePiece does; the tokenizer that is stored need not cut them.
    trained = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    trained.pre_tokenizer = pre_tokenizers.Metaspace(MARK, "always", True)
    train(trained, ["<unk>", "<s>", "</s>", *byte_tokens()], **sentencepiece_options())
    description = json.loads(trained.to_str())
    stored = json.loads(tokenizer.to_str())
    for key in ("normalizer", "pre_tokenizer"):
        description[key] = stored[key]
    description["added_tokens"] = description["added_tokens"][:3]
    tokenizer = Tokenizer.from_str(json.dumps(description))
    tokenizer.decoder = decoder
    add_template(tokenizer)
    return tokenizer


def fallback_decoder():
    return decoders.Sequence([decoders.Replace(MARK, " "), decoders.ByteFallback(),
                              decoders.Fuse(), decoders.Strip(" ", 1, 0)])


def llama2():
    tokenizer = sentencepiece(
        normalizers.Sequence([normalizers.Prepend(MARK), normalizers.Replace(" ", MARK)]), None,
        fallback_decoder())
    tokenizer.add_tokens([AddedToken("<tool>", normalized=True)])
    return tokenizer


def mistral():
    """Metaspace at the start only and without cutting, as newer files of the family have it."""
    return sentencepiece(None, pre_tokenizers.Metaspace(MARK, "first", False), fallback_decoder())


def metaspace():
    """Unknown characters instead of bytes, Metaspace as decoder, NFKC, stripped ends."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=False))
    tokenizer.normalizer = normalizers.Sequence([
        normalizers.NFKC(), normalizers.Replace("``", '"'), normalizers.Strip()])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(MARK, "always", True)
    tokenizer.decoder = decoders.Metaspace(MARK, "always", True)
    train(tokenizer, ["<unk>", "<s>", "</s>"], limit_alphabet=120)
    add_template(tokenizer)
    return tokenizer


def byte_level_behind(steps, normalizer=None, ignore_merges=False, **options):
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*steps, pre_tokenizers.ByteLevel(**options)])
    tokenizer.decoder = decoders.ByteLevel()
    return train(tokenizer, ["<|endoftext|>"], **byte_level_options())


def smollm():
    return byte_level_behind([pre_tokenizers.Digits(individual_digits=True)],
                             add_prefix_space=True, use_regex=True)


def tekken():
    return drop_merges(byte_level_behind(
        [pre_tokenizers.Split(Regex(TEKKEN), "isolated")], ignore_merges=True,
        add_prefix_space=False, use_regex=False))


def mixed():
    return byte_level_behind(
        [pre_tokenizers.Split(Regex(MIXED), "removed", invert=True),
         pre_tokenizers.Split("e", "merged_with_previous"),
         pre_tokenizers.Split(Regex("[aiou]"), "merged_with_next"),
         pre_tokenizers.Split(Regex(r"\p{P}"), "contiguous"),
         pre_tokenizers.Digits(individual_digits=False)],
        normalizers.NFD(), add_prefix_space=False, use_regex=False)


MAKERS = {maker.__name__: maker for maker in
          (gpt2, llama3, llama2, mistral, metaspace, smollm, tekken, mixed)}


def write_cases(tokenizer, folder, skipped):
    specials = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    generator = Generator(2, specials)
    texts = ["", " ", "a", "Hello world", "  two  spaces  ", "\n\nline\n", "don't DON'T 12345 67"]
    while len(texts) < NUM_CASES:
        text = generator.text()
        if len(text) <= MAX_TEXT and not skipped.intersection(text) and text not in texts:
            texts.append(text)
    with open(os.path.join(folder, "cases.jsonl"), "w", encoding="utf-8") as file:
        for text in texts:
            ids = tokenizer.encode(text).ids
            case = {"text": text, "ids": ids}
            decoded = tokenizer.decode(ids, skip_special_tokens=True)
            if decoded != text:
                case["decoded"] = decoded
            file.write(json.dumps(case, separators=(",", ":")) + "\n")


def main():
    random.seed(1)
    import tokenizers
    skipped = unknown_characters(tokenizers)
    for name in sys.argv[1:] or MAKERS:
        folder = os.path.join(HERE, "tokenizers", name)
        os.makedirs(folder, exist_ok=True)
        tokenizer = MAKERS[name]()
        path = os.path.join(folder, "tokenizer.json")
        with open(path, "w", encoding="utf-8") as file:
            json.dump(json.loads(tokenizer.to_str()), file, ensure_ascii=True,
                      separators=(",", ":"))
            file.write("\n")
        write_cases(tokenizer, folder, skipped)
        print(name, tokenizer.get_vocab_size(), os.path.getsize(path))


main()
