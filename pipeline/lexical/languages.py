"""Languages of texts: which there are, their stemmers and function words, and which one a text is in.

    sample of a text ─▶ its most frequent script ─▶ of the languages written in it, the one with most
                                                    function words; English where hardly any stands

Nothing is loaded or fetched for it. A language is a code of ISO 639-1. Languages whose script is theirs alone
need no words. Of a language without a stemmer words are counted as they stand.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Final, get_args

import regex
import Stemmer
from cairn.pipeline.config import Language

STEMMERS: Final[Mapping[str, str]] = {
    "ar": "arabic",
    "ca": "catalan",
    "cs": "czech",
    "da": "danish",
    "de": "german",
    "el": "greek",
    "en": "english",
    "eo": "esperanto",
    "es": "spanish",
    "et": "estonian",
    "eu": "basque",
    "fa": "persian",
    "fi": "finnish",
    "fr": "french",
    "ga": "irish",
    "hi": "hindi",
    "hu": "hungarian",
    "hy": "armenian",
    "id": "indonesian",
    "it": "italian",
    "lt": "lithuanian",
    "ne": "nepali",
    "nl": "dutch",
    "no": "norwegian",
    "pl": "polish",
    "pt": "portuguese",
    "ro": "romanian",
    "ru": "russian",
    "sr": "serbian",
    "sv": "swedish",
    "ta": "tamil",
    "tr": "turkish",
    "yi": "yiddish",
}
"""Snowball's stemmers by language."""

FUNCTION_WORDS: Final[Mapping[str, str]] = {
    "en": "the of and to in a is that for was it with as on be by are at from this which or an were his "
    "not have has had but they their been who also its can he she we you what when if how there "
    "would will more other about into than them these some only do does did your my our i",
    "de": "der die und das den dem des ein eine einer eines einem einen ist sind war waren wird werden "
    "wurde wurden nicht mit von zu zum zur im auf für als auch sich es er sie wir ihr ich bei nach "
    "aus durch über oder aber wie wenn dass hat haben kann noch nur vor bis so was man um am an in "
    "wer wo welche welcher",
    "fr": "le la les de des du et un une est dans que qui pour par sur pas ne plus au aux avec ce cette "
    "ces sont il elle ils nous vous je se son sa ses été était ou mais comme être avait ont fait "
    "leur leurs en l d s n j c qu y quel quelle quels quelles où on m t",
    "es": "el la los las de del y en que un una por con para es se no lo al como más su sus fue son "
    "entre era este esta pero o ha también le sobre desde cuando hasta hay donde qué cuál quién "
    "sin ser muy ya uno si me mi cómo dónde cuándo cuántos",
    "it": "il lo la i gli le di del della dei delle e che un una per con non è in si da al dal alla nel "
    "nella sono come più anche ma o su ha questo questa era essere stato suo sua loro ed cui dopo "
    "l d dell all nell dalla degli ai chi quale quando dove perché",
    "pt": "o a os as de do da dos das e que em um uma para com não no na nos nas por se é mais como ao "
    "foi são sua seu ou quando muito também já ser está pelo pela entre era depois até ele ela "
    "isso qual quem onde à às",
    "nl": "de het een en van in is dat op te zijn voor met die niet aan er ook als bij door maar was "
    "werd wordt naar om uit over nog dan deze hij ze we ik je wie wat waar hoe of tot heeft hebben "
    "kan worden hun haar",
    "sv": "och i att det som en på är av för med den till inte var de ett om han men har från sig så kan "
    "vi eller när där hade vid efter under också sin sina detta vad hur mycket vara blev skulle",
    "da": "og i at det som en på er af for med den til ikke var de et om han men har fra sig så kan vi "
    "eller når der hvor hvad hvis efter også blev blive jeg du dig mig være have havde deres sin "
    "efter noget meget ved bliver",
    "no": "og i at det som en på er av for med den til ikke var de et om han men har fra seg så kan vi "
    "eller når der hvor hva hvis etter også ble bli jeg du deg meg være ha hadde deres sin noe mye "
    "ved blir",
    "fi": "ja on ei se että oli hän mutta kun joka ovat myös kuin niin tai sen ole voi jos mitä tämä "
    "sekä olivat jossa minä sinä he me te vain mikä kuka missä jonka ennen jälkeen hänen niiden "
    "mukaan noin vuonna",
    "hu": "a az és hogy nem is egy volt ez de meg csak van már mint ha vagy el még kell fel ezt azt "
    "lehet minden ki mi mely amely voltak szerint után között által pedig sem majd így úgy mert "
    "hol mikor milyen",
    "ro": "și în de la a un o cu pe nu se ce este care din mai ca pentru sunt sa au fost al ale prin lui "
    "acest această dar sau după când cum unde între era ei ea el fi ar cele lor sau despre către "
    "cine",
    "pl": "i w na z się nie do że jest to o jak po co tak za od a ale przez dla jego był była było są "
    "oraz czy ten ta te które który która być tym tego może już tylko ich jej lub ze gdzie kiedy "
    "kto także",
    "cs": "a se v na je že o s z do i to k ve pro za by ale si po jako jsem jeho tak od jsou byl byla "
    "bylo které který která nebo podle při až také už jen co kde kdy kdo ze mezi jejich však být",
    "tr": "ve bir bu da de için ile olarak çok daha olan gibi en kadar ne o mi mı var ya veya ancak "
    "sonra her değil ki ise oldu olduğu tarafından göre hangi nasıl kim nerede ama kendi ben sen "
    "biz şey zaman",
    "id": "yang dan di dengan untuk dari pada dalam ini itu adalah ke tidak oleh sebagai juga akan ada "
    "telah atau dapat karena mereka tersebut dia saya kita kami bisa seperti lebih saat apa siapa "
    "bagaimana adalah menjadi secara",
    "vi": "và của là các có được trong cho một với những không đã người này từ để khi đến về cũng như ở "
    "tại ra vào năm trên theo hay hoặc bị do nó họ ông bà gì nào đó thì sự việc",
    "ca": "el la els les de del i en que un una per amb és no es al com més seva seu va són dels les "
    "aquest aquesta però o també ha on quan fins entre ser era d l s qui què perquè molt als pels",
    "eu": "eta da ez bat izan zen du dira zuen hau baina ere edo bere egin dute den ziren baino beste "
    "oso horren zer nor non noiz nola dela duen arte",
    "et": "ja on ei et see oli ta mis kui aga ka oma või nii seda selle kes veel ning olid siis pole "
    "mida kus üks ainult tema nad me kuid pärast enne",
    "lt": "ir yra kad į iš su ne tai kaip buvo o bet ar jis ji jo jos už apie po nuo iki taip pat dėl "
    "prie kuris kuri kurie per jų būti kas kur kada tik dar",
    "ga": "agus an na is ar le i go do ní bhí sé sí tá a ag ó den don sa san leis mar ach nó faoi chun "
    "mé tú siad gur nach atá bhfuil cé conas",
    "eo": "la de kaj en estas al ke ne por kun pri li ĝi mi vi ili sed aŭ kiel tio kiu kiuj estis de per "
    "ankaŭ pli oni ĝis post antaŭ kio kie kiam",
    "ru": "и в не на что с как по из это к он но за от у же его для о а было был была были то она они бы "
    "так все или также при до если мы я вы который которые которая когда где кто какой после их её "
    "во со чем",
    "uk": "і в не на що з як по із це до він але за від у його для о а було був була були та вона вони "
    "або також при якщо ми я ви який які яка коли де хто після їх її й є під про",
    "bg": "и в не на че с как по от това към той но за у го да се е са бил беше били тя те или също при "
    "до ако ние аз който която които когато къде кой след им ще си като със във",
    "be": "і ў не на што з як па гэта да ён але за ад у яго для аб а было быў была былі та яна яны ці "
    "таксама пры калі мы я вы які якія якая дзе хто пасля іх яе",
    "mk": "и во не на што со како по од ова кон тој но за го да се е сум беше биле таа тие или исто при "
    "до ако ние јас кој која кои кога каде ќе си како",
    "sr": "и у не на што са како по од ово он али за га да се је су био била били она они или такође при "
    "до ако ми ја који која које када где ко ће i u ne na što sa kako po od ovo on ali za ga da se "
    "je su bio bila bili ona oni ili takođe pri do ako mi ja koji koja koje kada gde ko će",
    "ar": "في من على إلى أن التي الذي عن هذا هذه مع كان كانت ما لا هو هي أو ثم بين بعد قبل قد لم كل ذلك "
    "و إن كما حيث عند غير حتى أي متى أين كيف هل منذ خلال",
    "fa": "و در به از که این را با است برای آن یک خود تا بر هم نیز شد بود می ها شده است کرد باید اما یا "
    "هر آنها چه کجا چگونه دارد بین پس ای",
    "ur": "کے میں کی ہے اور سے کا کو اس نے پر کہ یہ ہیں تھا بھی نہیں ایک وہ تھی گیا جو تو لیے کر ہو کیا "
    "تھے اپنے ساتھ بعد",
    "hi": "के में की है और से का को हैं पर यह कि ने एक था भी नहीं इस थे थी लिए जो तो हो या वह ये कर गया "
    "किया उस अपने साथ बाद द्वारा क्या कौन कब कहाँ कितने किस जा रहा तक ही",
    "ne": "को र मा छ हो ले का लाई पनि भने यो छन् थियो एक गर्न गरेको भएको तथा बाट त्यो उनी छैन के कि यस "
    "हुन् थिए नै सबै जो",
    "mr": "आणि आहे या व हे ते तो ती च्या मध्ये आहेत होते होता होती एक नाही हा ही की पण त्या करण्यात "
    "त्यांच्या असे म्हणून केले असून येथे",
    "el": "και το της του η ο να τα την στο των με που για από στην ένα μια είναι δεν ως τους τον οι σε "
    "κατά ήταν αλλά ή αυτό έχει μετά τη στη στις όταν ποιος τι πώς",
    "hy": "և է որ ու մեջ են ին այդ այս նա իր համար էր հետ մի թե բայց ոչ կամ նրա որոնք նաև",
    "ta": "மற்றும் ஒரு இந்த என்று அந்த அது இது என்ற உள்ள அவர் இருந்து போது அல்லது",
    "he": "של את על לא הוא היא עם זה כי גם או אל היה כל אם אני בין יש לאחר הם אך",
    "yi": "די און פון אין אַ איז דער צו האָט דאָס מיט נישט זיך אויף ער וואָס",
}
"""Words that say nothing of a subject, by language: they tell languages apart, and BM25 leaves them out."""

LETTERS: Final[Mapping[str, str]] = {
    "de": "äöüß",
    "fr": "éèêàçùœ",
    "es": "ñáíóúé",
    "it": "èàòùìé",
    "pt": "ãõçáéêóâ",
    "nl": "ëĳ",
    "sv": "åäö",
    "da": "æøå",
    "no": "æøå",
    "fi": "äö",
    "hu": "őűöüáéíó",
    "ro": "ăâîșțşţ",
    "pl": "ąęłńśźżćó",
    "cs": "ěščřžýůťďňáéí",
    "tr": "ığşçöü",
    "vi": "ăâđêôơưạảấầậắằếềệịọộớờợụứừự",
    "ca": "çïàèòé",
    "et": "õäöü",
    "lt": "ąčęėįšųūž",
    "ga": "áéíóú",
    "eo": "ĉĝĥĵŝŭ",
    "sr": "čćžšđђћјљњџ",
    "ru": "ыэё",
    "uk": "іїєґ",
    "bg": "ъщ",
    "be": "ўіыэё",
    "mk": "ѓќѕјљњџ",
    "ar": "ةىأإ",
    "fa": "پچژگکی",
    "ur": "ٹڈڑںےہھ",
    "mr": "ळ",
    "yi": "ײױ",
}
"""Letters that English or a script's commonest language does without; one is half a vote."""

_LUCENES = (
    "a an and are as at be but by for if in into is it no not of on or such that the their then there these "
    "they this to was will with"
)
_FUNCTION_WORDS: Final[Mapping[str, frozenset[str]]] = {
    language: frozenset(words.split()) for language, words in FUNCTION_WORDS.items()
}
STOP_WORDS: Final[Mapping[str, frozenset[str]]] = {**_FUNCTION_WORDS, "en": frozenset(_LUCENES.split())}
"""What BM25 leaves out of texts in a language; of English Lucene's."""
_FURTHER = (
    "after all although am another any because before being between both could doing done down during each "
    "few from further her here him just may me might must nor off once out over own same shall should since "
    "so though through too under until up upon us very where whether while whom whose why yet"
)
UNTOLD_WORDS: Final[Mapping[str, frozenset[str]]] = {
    **_FUNCTION_WORDS,
    "en": STOP_WORDS["en"] | _FUNCTION_WORDS["en"] | frozenset(_FURTHER.split()),
}
"""What is never shown as the word that was found, or as the name of a subject."""
_QUESTIONS = (
    "about am been being could did do does doing had has have he her hers him his how i its me my our she "
    "should we were what when where which who whom whose why would you your"
)
UNASKED_WORDS: Final[Mapping[str, frozenset[str]]] = {"en": frozenset(_QUESTIONS.split())}
"""What a question is put with, and BM25 does not ask for: no word that is a name or a keyword, too."""
LEAST_ASKED: Final = 2
"""Words that must be left of a query without those."""
LEAST_FUNCTION_WORDS: Final = 2
"""How many function words show the language of a query: a single one, such as `war` in German, may be a
word of another language."""


def languages_shown(words: Iterable[str], languages: Sequence[str]) -> list[str]:
    """Return in which of some languages a query has the most function words, none where it has hardly any."""
    words = set(words)
    counts = [len(words & _FUNCTION_WORDS.get(language, frozenset())) for language in languages]
    most = max(counts, default=0)
    if most < LEAST_FUNCTION_WORDS:
        return []
    return [language for language, count in zip(languages, counts, strict=True) if count == most]


_SCRIPTS: Final[Mapping[str, tuple[str, ...]]] = {
    "Latin": (
        *("en", "de", "fr", "es", "it", "pt", "nl", "sv", "da", "no", "fi", "hu", "ro", "pl", "cs", "tr"),
        *("id", "vi", "ca", "eu", "et", "lt", "ga", "eo", "sr"),
    ),
    "Cyrillic": ("ru", "uk", "bg", "be", "mk", "sr"),
    "Arabic": ("ar", "fa", "ur"),
    "Devanagari": ("hi", "ne", "mr"),
    "Hebrew": ("he", "yi"),
    "Han": ("zh",),
    "Hiragana": ("ja",),
    "Katakana": ("ja",),
    "Hangul": ("ko",),
    "Thai": ("th",),
    "Lao": ("lo",),
    "Khmer": ("km",),
    "Myanmar": ("my",),
    "Greek": ("el",),
    "Armenian": ("hy",),
    "Georgian": ("ka",),
    "Tamil": ("ta",),
    "Telugu": ("te",),
    "Bengali": ("bn",),
    "Gujarati": ("gu",),
    "Kannada": ("kn",),
    "Malayalam": ("ml",),
    "Gurmukhi": ("pa",),
    "Sinhala": ("si",),
    "Ethiopic": ("am",),
}
"""The languages of each script, the commonest first: a text without function words is taken for one in it."""

LANGUAGES: Final = get_args(Language)[2:]
"""All languages that are told apart."""

AUTO: Final = "auto"
"""The language of every document is told from its text."""
NO_LANGUAGE: Final = "none"
"""Words are counted as they stand, function words too."""
UNSPACED: Final = frozenset({"zh", "ja", "ko", "th", "lo", "km", "my"})
"""Languages whose words are counted by pairs of characters."""
WITHOUT_LATIN: Final = frozenset(LANGUAGES).difference(_SCRIPTS["Latin"])
"""Languages that are not written in Latin letters."""

SAMPLE_CHARACTERS: Final = 400
"""Read of the beginning and of the middle of a text to tell its language: some 130 words."""
VOTES_A_WORD: Final = 2
"""Votes of a function word; a letter has one."""
LEAST_VOTES: Final = 3
"""Votes that a language needs, unless it is its script's commonest."""
LEAST_KANA: Final = 0.05
"""Kana for each ideograph, from which on a text is Japanese and not Chinese."""
LETTERS_AN_IDEOGRAPH: Final = 3
"""How many letters say as much as one ideograph."""

_SCRIPT = regex.compile("|".join(rf"(?P<{script}>\p{{{script}}})" for script in _SCRIPTS))
_OTHER = "Latin"
"""Letters of further scripts count with these."""

_Votes = dict[str, tuple[str, ...]]


def _votes(table: Mapping[str, Iterable[str]]) -> Mapping[str, _Votes]:
    """Return the languages that have a word or a letter, by script."""
    votes: dict[str, _Votes] = {script: {} for script in _SCRIPTS}
    for script, languages in _SCRIPTS.items():
        own = votes[script]
        for language in languages:
            for each in dict.fromkeys(table.get(language, ())):
                own[each] = (*own.get(each, ()), language)
    return votes


def _is_telling(word: str) -> bool:
    """Whether a word tells languages apart; a single letter of ASCII may be a name, or of a formula."""
    return len(word) > 1 or not word.isascii()


_OF_WORDS: Final = _votes(
    {language: [*filter(_is_telling, words.split())] for language, words in FUNCTION_WORDS.items()}
)
_OF_LETTERS: Final = _votes(LETTERS)


def language_of(text: str) -> str:
    """Return the language of a text; English, or the commonest of its script, where it shows none.

    Words with a comma at their end are passed over: there are enough without.
    """
    if len(text) > 2 * SAMPLE_CHARACTERS:
        middle = len(text) // 2
        text = f"{text[:SAMPLE_CHARACTERS]} {text[middle : middle + SAMPLE_CHARACTERS]}"
    text = text.lower()
    letters = None if text.isascii() else Counter(text)
    script = _OTHER if letters is None else _script_of(letters)
    languages = _SCRIPTS[script]
    if len(languages) == 1:
        return languages[0]
    votes: Counter[str] = Counter()
    for own, count in Counter(map(_OF_WORDS[script].get, text.split())).items():
        for language in own or ():
            votes[language] += VOTES_A_WORD * count
    for letter, count in (letters or {}).items():
        for language in _OF_LETTERS[script].get(letter, ()):
            votes[language] += count
    best = max(languages, key=votes.__getitem__)
    return best if votes[best] >= LEAST_VOTES else languages[0]


def _script_of(letters: Mapping[str, int]) -> str:
    """Return the script that most is written in; ideographs among kana are Japanese."""
    counts: Counter[str] = Counter()
    for letter, count in letters.items():
        if (script := _script_of_letter(letter)) is not None:
            counts[script] += count
    num_kana, num_ideographs = counts.pop("Hiragana", 0) + counts.pop("Katakana", 0), counts.pop("Han", 0)
    is_japanese = num_kana > LEAST_KANA * num_ideographs
    counts["Hiragana" if is_japanese else "Han"] = LETTERS_AN_IDEOGRAPH * (num_kana + num_ideographs)
    return max(_SCRIPTS, key=counts.__getitem__)


@cache
def _script_of_letter(letter: str) -> str | None:
    match = _SCRIPT.match(letter)
    return (match and match.lastgroup) or (_OTHER if letter.isalpha() else None)


@cache
def stemmer_of(language: str) -> Stemmer.Stemmer | None:
    """Return the stemmer of a language, None where it has none."""
    return Stemmer.Stemmer(STEMMERS[language], 0) if language in STEMMERS else None
