"""What a text is written in: as a mark or its file says, UTF-8 wherever it can be, else what it looks like.

A guess takes the encoding in which most of the letters are those of one language. Frequent letters count
more, and what no text of it has, such as a letter of Greek beside one of ASCII, counts against it.
"""

# ruff: noqa: RUF001 (letters and signs that look like others are what this file is about)

from __future__ import annotations

import codecs
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Final

HEAD_BYTES: Final = 1 << 16
"""How much of a text is looked at to tell its encoding and dialect."""
_ASCII: Final = bytes(range(128))
_CONTROLS: Final = re.compile("[\0-\x08\x0e-\x1f]")
_SAMPLE_BYTES: Final = 4_096
_MARKS: Final = {
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
_JAPANESE_SHIFTS: Final = (b"\x1b$B", b"\x1b$@")
"""What ISO-2022-JP begins a run of Japanese with."""
_SAMPLE_LETTERS: Final = 400
_LEAST_LIKENESS: Final = 0.55
"""How much a text must look like one of a language to be read as such."""
_LEAST_UNMARKED: Final = 0.6
"""The same for UTF-16 that nothing marks, with what it has of ASCII."""
_KEPT: Final = 2 / 3
"""How much of what is not ASCII can be read as UTF-8, at least, where only the rest is damaged."""
_LETTERS: Final[Mapping[str, Sequence[str]]] = {
    "western": (
        "éèàçêôîùâëïœ|ûüæÿ", "äöüß|é", "ñáíóúéüç", "ãáéíóúâêôçàü|õ", "èéàòùìî", "åäöøæéüèà", "ëïéèöüáó",
        "áéíóúæö|þðý", "àçèéíïòóúü", "õäöüšž",
    ),
    "central": ("łąężśćńóź", "áéíýěščřžůúťďňó", "áäčďéíĺľňóôŕšťúýž", "áéíóöőúüű", "ăâîşţ", "čćšžđ"),
    "turkish": ("ışğüöçİâîû",),
    "baltic": ("ąčęėįšųūž", "āčēģīķļņšūž", "õäöüšž"),
    "vietnamese": ("ăâđêôơưáàãéèêíìóòõúùý\u0300\u0301\u0303\u0309\u0323",),
    "cyrillic": (
        "оеаинтсрвлкмдпуяыьгз|бчйхжшюцщэфъё", "оаиніветрсклудмпяьз|бгйчхжїцшюєфщґ",
        "аиоенрстјувкдпмз|лгбчшцњжљћхђфџ",
    ),
    "greek": ("αοιετσνηυρκπςλμωίόάέή|δγχθφβξζψύώϊϋΐΰ",),
    "hebrew": ("יוהלאמרתבשנםדחעקפכ|סגטזצןךףץְֱֲֳִֵֶַָֹֻּ",),
    "arabic": ("اليمنورتبةعدسفهكقحأجط|صخشإذزثىضءغظئآؤپچژگڤ،؟؛ـًٌٍَُِّْ",),
    "thai": ("านรอกเงมยลวดทสตะปบคหแจพชขใไโ่้ัิีื์|ณผฟถฐธศษญภซฎฏฑฒฬฮฉฝฌฆๆ็ํุูึำฯ๐๑๒๓๔๕๖๗๘๙",),
}  # fmt: skip
"""Letters beyond ASCII of the languages of a family, the frequent ones first."""
_FAMILIES: Final[Mapping[str, Sequence[str]]] = {
    "cp1252": ["western"], "cp1250": ["central"], "cp1254": ["turkish"], "cp1251": ["cyrillic"],
    "cp1253": ["greek"], "cp1255": ["hebrew"], "cp1256": ["arabic"], "cp874": ["thai"], "cp1257": ["baltic"],
    "cp1258": ["vietnamese"], "koi8_r": ["cyrillic"], "koi8_u": ["cyrillic"], "cp866": ["cyrillic"],
    "iso8859_2": ["central"], "iso8859_15": ["western"], "iso8859_5": ["cyrillic"], "mac_roman": ["western"],
    "cp850": ["western"], "cp852": ["central"], "cp932": ["japanese"], "euc_jp": ["japanese"],
    "gb18030": ["chinese"], "big5": ["chinese"], "cp949": ["korean"],
    "utf-16-le": ["japanese", "chinese", "korean"], "utf-16-be": ["japanese", "chinese", "korean"],
}  # fmt: skip
"""What may be written in each encoding; of equally likely ones the first is taken."""
_LONG_RUN: Final = 4
"""More letters beyond ASCII than words of Latin letters have one after the other."""
_OF_CAPITALS: Final = 0.8
"""How much letters count of a text in capitals, as which small letters of another encoding may be read."""
_LATIN: Final = ("western", "central", "turkish", "baltic", "vietnamese")
_SIGNS: Final = "€£¥µ÷–—“”„‘’‚«»°§…©®·•™²³±×¿¡½¼ºª№"
_WITHIN_WORDS: Final = "’·–—"
_NOT_THAI: Final = re.compile("(?<![ก-ฮั-ู])[ัิ-ฺ็-๎]|[เ-ไ](?![ก-ฮ])")
"""Vowels and tones without the consonant that they belong to."""
_BEYOND_ASCII: Final = re.compile(r"[^\0-\x7f]+")
_RANGES: Final[Mapping[str, Sequence[tuple[str, str, float, float]]]] = {
    # Any small letters of Cyrillic can be read as Kana of half the width.
    "japanese": (("\u3040", "ヿ", 1.0, 1.0), ("一", "鿿", 0.8, 0.5), ("｡", "ﾟ", 0.2, 0.2)),
    "chinese": (("一", "鿿", 1.0, 0.5),),
    "korean": (("가", "힣", 1.0, 0.6), ("一", "鿿", -0.3, -0.3)),
}
"""How much letters of languages count that have too many for a list, frequent ones and others."""
_WIDE_SIGNS: Final = tuple((first, last, 0.4, 0.4) for first, last in ("\u3000〿", "！｠", "①\u24ff", "㈀㏿"))
_FREQUENT: Final = frozenset(
    "的一是不了在人有我他这个们中来上大为和国地到以说时要就出会可也你对生能而子那得于着下自之年过发后作里用道"
    "行所然家种事成方多经么去法学如都同现当没动面起看定天分还进好小部其些主样理心她本前开但因只从想实日军者意"
    "无力它与长把机十民第公此已工使情明性知全三又关点正业外将两高间由问很最重并物手应战向头文体政美相见被利什"
    "二等产或新己制身果加西斯月话合回特代内信表化老给世位次度门任常先海通教原东声提立及比员解水名真论处走义各"
    "入几口认条平系气题活更别打变四总何电数安少报结反受目太量再建务做接必场件计管期市直资命指统区保至形社便空"
    "决治展科司基书非则界达光放强即像难且权设式色路记品住告类求据程北边该交规取确传清今切识带导运請個們來為國"
    "說時會對於過發後裡經麼學現當沒動還進樣開從實無與長機關點業將兩間應頭體見產話內給門東聲員論處義幾認條氣題"
    "別變總電數報結務場計資統區決書則達強難權設記類據邊該規確傳識帶導運"
    "이다는의에을하가고지로은를한기사어도리자인아일대시보스나정해있서부전라주들수장그만공조국제연과원유성상구"
    "동여소신되적년것세우학계습니없할오입며면와및용위않음게때모문물방생개치선실화경관식작진행불안무발명파비저"
    "러거려분요트크드설본"
)
"""The frequent letters of Chinese, simplified and traditional, and syllables of Korean."""


def encoding_of(raw: bytes, declared: str = "") -> tuple[str, bool]:
    """Return what the beginning of a text is written in, and whether it is a guess.

    It is what a mark says, UTF-8 wherever it can be, what is ``declared``, or what it looks like: of texts of
    the West, that is windows-1252. UTF-8 with damaged characters among others stays that.
    """
    for mark, encoding in _MARKS.items():
        if raw.startswith(mark):
            return encoding, False
    name = _OF_A_VENDOR.sub("cp", _NO_PART.sub("", declared.lower()))
    try:
        codec = codecs.lookup(_OTHER_NAMES.get(name, name)).name
        "".encode(codec)
    except (LookupError, ValueError):  # of one that does not exist, or is none of texts
        codec = ""
    if unmarked := _unmarked_encoding(raw):
        return unmarked, codec != unmarked
    order = ["utf-8-sig", _AS_BROWSERS.get(codec, codec)]
    for each in filter(None, reversed(order) if codec.startswith(_SEVEN_BITS) else order):
        if each in _WITH_CONTROLS or _is_in(raw, each):
            return each, False
    kept = len(raw.decode("utf-8", "ignore").encode().translate(None, delete=_ASCII))
    if b"\0" not in raw and kept < _KEPT * len(raw.translate(None, delete=_ASCII)):
        first = raw.rfind(b"\n", 0, re.search(b"[\x80-\xff]", raw).start()) + 1  # type: ignore[union-attr]
        sample = raw[first - first % 2 :][:HEAD_BYTES]
        is_whole = len(raw) < HEAD_BYTES
        found = {each: _likeness(sample, each) for each in _FAMILIES if _is_in(sample, each, is_whole)}
        best = max(found, key=found.__getitem__, default="")
        if best and found[best] >= _LEAST_LIKENESS:
            return best, True
    return "utf-8-sig", False


def _likeness(raw: bytes, encoding: str) -> float:
    """Return how much a text in an encoding looks like one of the languages that are written in it."""
    text = raw.decode(encoding, "ignore")
    num_letters, runs = 0, list[re.Match[str]]()
    for run in _BEYOND_ASCII.finditer(text):
        runs.append(run)
        num_letters += len(run[0])
        if num_letters >= _SAMPLE_LETTERS:
            break
    found = list[float]()
    for family in _FAMILIES[encoding]:
        is_odd = _is_odd_latin if family in _LATIN else _is_odd_in_ascii
        letters = "".join(run[0] for run in runs if family in _RANGES or not is_odd(run))
        lost = num_letters - len(letters)
        is_upper = family not in _LATIN and letters.isupper()
        share = _OF_CAPITALS if is_upper else 1.0
        letters = letters.lower() if is_upper else letters
        lost += 2 * len(_NOT_THAI.findall(text[: runs[-1].end()])) if family == "thai" and runs else 0
        found += [
            share * sum(weights.get(each, -1.0) for each in letters) - lost for weights in _weights(family)
        ]
    return max(found) / max(1, num_letters)


@cache
def _weights(family: str) -> Sequence[Mapping[str, float]]:
    """Return how much each letter counts for each language of a family."""
    if family in _RANGES:
        return [
            {
                letter: often if letter in _FREQUENT else seldom
                for low, high, often, seldom in (*_RANGES[family], *_WIDE_SIGNS)
                for letter in map(chr, range(ord(low), ord(high) + 1))
            }
        ]
    found = list[Mapping[str, float]]()
    for letters in _LETTERS[family]:
        frequent, _, others = letters.partition("|")
        weight = 1.0 if family in _LATIN else 0.5  # KOI8 has capitals where others have small letters
        capitals = {each.upper(): weight for each in frequent + others if len(each.upper()) == 1}
        signs = dict.fromkeys(_SIGNS, 1.0) | {"\xa0": 0.5}
        found.append(signs | capitals | dict.fromkeys(others, 0.6) | dict.fromkeys(frequent, 1.0))
    return found


def _is_odd_latin(run: re.Match[str]) -> bool:
    """Whether no text of Latin letters has such a run of them: a long one, a sign in a word, or `éT`."""
    letters, (before, behind) = run[0], _beside(run)
    is_sign = len(letters) == 1 and letters in _SIGNS and letters not in _WITHIN_WORDS
    is_within = before.isalpha() and behind.isalpha()
    is_mixed = (letters[-1].islower() and behind.isupper()) or (before.islower() and letters[0].isupper())
    return len(letters) > _LONG_RUN or (is_sign and is_within) or is_mixed


def _is_odd_in_ascii(run: re.Match[str]) -> bool:
    """Whether letters of another script touch letters of ASCII, or one stands alone."""
    is_touched = len(run[0]) == 1 or any(map(str.isalpha, _beside(run)))
    return is_touched and any(each not in _SIGNS for each in run[0])


def _beside(run: re.Match[str]) -> tuple[str, str]:
    return run.string[run.start() - 1 : run.start()], run.string[run.end() : run.end() + 1]


def _is_in(raw: bytes, encoding: str, is_whole: bool | None = None) -> bool:
    """Whether a text, or the beginning of one, is in an encoding."""
    try:
        is_whole = len(raw) < HEAD_BYTES if is_whole is None else is_whole
        codecs.getincrementaldecoder(encoding)().decode(raw, final=is_whole)
    except UnicodeDecodeError:
        return False
    return True


def _unmarked_encoding(raw: bytes) -> str | None:
    """Return what a text without a mark is written in that reads as ASCII, too, or as one with NULs.

    What is UTF-16 has no controls in it, and letters of ASCII and of one language or script.
    """
    for each in ("utf-16-le", "utf-16-be") if b"\0" in raw else ():
        text = raw[:_SAMPLE_BYTES].decode(each, "ignore")
        letters = "".join(_BEYOND_ASCII.findall(text))
        if len(letters) < len(text) and not _CONTROLS.search(text):
            languages = (weights for family in (*_LETTERS, *_RANGES) for weights in _weights(family))
            likely = max(sum(weights.get(letter, -1.0) for letter in letters) for weights in languages)
            of_script = max(Counter(ord(letter) >> 8 for letter in letters).values(), default=0)
            if len(text) - len(letters) + max(likely, of_script) >= _LEAST_UNMARKED * len(text):
                return each
    is_shifted = any(shift in raw for shift in _JAPANESE_SHIFTS) and raw.isascii()
    return "iso2022_jp" if is_shifted and _is_in(raw, "iso2022_jp") else None


_NO_PART: Final = re.compile("^(?:x-)+|-[ie]$")
"""What is added to names of encodings: experimental, and in which order Hebrew and Arabic stand."""
_OF_A_VENDOR: Final = re.compile(r"^(?:windows|dos|ibm|cp)[-_]?(?=\d)")
_OTHER_NAMES: Final = {"cp31j": "cp932", "koi8-ru": "koi8_u", "cn-big5": "big5"}
"""Names of encodings that Python does not know."""
_AS_BROWSERS: Final = {
    "ascii": "cp1252", "iso8859-1": "cp1252", "iso8859-9": "cp1254", "tis-620": "cp874", "gb2312": "gb18030",
    "gbk": "gb18030", "shift_jis": "cp932", "euc_kr": "cp949", "big5": "big5hkscs",
}  # fmt: skip
"""Encodings whose names stand for larger ones, as the Encoding Standard of the web has it."""
_WITH_CONTROLS: Final = ("cp1252", "cp1254")
"""Encodings with bytes that are no letters, which browsers take for controls and Python refuses."""
_SEVEN_BITS: Final = ("iso2022", "hz", "utf-7")
"""Encodings whose texts could be ASCII as well."""


def text_of(raw: bytes, declared: str = "") -> tuple[str, str]:
    """Return a text, and its encoding where that is a guess or where damaged characters are U+FFFD."""
    encoding, is_guess = encoding_of(raw, declared)
    try:
        return decoded(raw, encoding), encoding if is_guess else ""
    except UnicodeDecodeError:
        told = f"{encoding.removesuffix('-sig')} with U+FFFD for damaged characters"
        return raw.decode(encoding, "replace"), told


def decoded(raw: bytes, encoding: str) -> str:
    """Decode a text as browsers do, which read every byte of the encodings of Western Europe and Turkish."""
    try:
        return raw.decode(encoding)
    except UnicodeDecodeError:
        if encoding not in _WITH_CONTROLS:
            raise
        letters = {each: ord(bytes([each]).decode(encoding, "ignore") or chr(each)) for each in range(256)}
        return codecs.charmap_decode(raw, "strict", letters)[0]
