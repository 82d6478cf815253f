import pytest

from vitrail.data.scenes.plurals import pluralize


@pytest.mark.parametrize(
    ("one", "many"),
    [
        ("dog", "dogs"),
        ("dog face", "dog faces"),
        ("box", "boxes"),
        ("church", "churches"),
        ("fly", "flies"),
        ("key", "keys"),
        ("wolf", "wolves"),
        ("kitchen knife", "kitchen knives"),
        ("snowman", "snowmen"),
        ("Man", "Men"),
        ("human", "humans"),
        ("goldfish", "goldfish"),
        ("sheep", "sheep"),
        ("Ox", "Oxen"),
        ("game die", "game dice"),
        ("scissors", "scissors"),
        ("slice of pizza", "slices of pizza"),
        ("person in bed", "people in bed"),
        ("", "s"),
    ],
)
def test_plural(one, many):
    assert pluralize(one) == many
