"""The language of a text, told without a library."""

from __future__ import annotations

import pytest
from cairn.pipeline.lexical.languages import FUNCTION_WORDS, LANGUAGES, STEMMERS, language_of, stemmer_of


@pytest.mark.parametrize(
    ("language", "text"),
    [
        ("en", "The house that we saw was not the one you had in mind."),
        ("de", "Das Haus, das wir gesehen haben, ist nicht mit dem anderen zu vergleichen."),
        ("fr", "La maison que nous avons vue est dans une rue qui n'a pas de nom."),
        ("es", "La casa que vimos está en una calle con los mejores árboles de la ciudad."),
        ("it", "La casa che abbiamo visto è in una strada con gli alberi della città."),
        ("pt", "A casa que vimos não está em uma rua com as árvores da cidade."),
        ("nl", "Het huis dat wij zagen is niet het huis van de man met een hond."),
        ("sv", "Huset som vi såg är inte det som han har och det var för dyrt."),
        ("pl", "Dom, który widzieliśmy, nie jest na ulicy, przy której są drzewa."),
        ("tr", "Gördüğümüz ev bir sokakta ve bu ev çok daha büyük değil."),
        ("fi", "Talo, jonka näimme, ei ole se, joka oli kadun varrella, mutta se on pieni."),
        ("vi", "Ngôi nhà mà chúng tôi đã thấy không phải là của những người này."),
        ("ru", "Дом, который мы видели, не был на той же улице, что и этот."),
        ("uk", "Будинок, який ми бачили, не був на тій самій вулиці, що і цей."),
        ("ar", "البيت الذي رأيناه ليس في هذا الشارع من المدينة"),
        ("fa", "خانه ای که ما دیدیم در این خیابان نیست و با آن فرق دارد"),
        ("hi", "जो घर हमने देखा वह इस सड़क पर नहीं है और यह बड़ा है"),
        ("el", "Το σπίτι που είδαμε δεν είναι στον δρόμο"),
        ("zh", "我们看到的房子不在这条街上。"),
        ("zh", "使用 backup.sh 备份脚本时出现错误代码 E1042 请检查 GitHub 设置"),
        ("ja", "私たちが見た家はこの通りにありません。"),
        ("ko", "우리가 본 집은 이 거리에 없습니다."),
        ("th", "บ้านที่เราเห็นไม่ได้อยู่บนถนนสายนี้"),
        ("ta", "நாங்கள் பார்த்த வீடு இந்த தெருவில் இல்லை"),
    ],
)
def test_language_of_a_sentence(language: str, text: str) -> None:
    assert language_of(text) == language


@pytest.mark.parametrize(
    "text", ["", "E1042", "int main(void) { return a + l * d; }", "Café Müller", "1 2 3 — «»"]
)
def test_a_text_that_shows_no_language_counts_as_english(text: str) -> None:
    assert language_of(text) == "en"


def test_tables_speak_of_languages_that_are_told_apart() -> None:
    assert set(STEMMERS) | set(FUNCTION_WORDS) <= set(LANGUAGES)
    assert all(stemmer_of(language) is not None for language in STEMMERS)
