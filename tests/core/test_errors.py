from pivotpatch.core.errors import InputError, choose_one_of


def test_error_has_the_form_where_wrong_todo() -> None:
    error = InputError("cut_patches", "grid is 0", "give 1 or more")
    assert str(error) == "cut_patches: grid is 0; give 1 or more"
    assert isinstance(error, ValueError)


def test_a_long_list_is_cut() -> None:
    advice = choose_one_of("n7x", [f"n{i}" for i in range(30)])
    assert advice.startswith("did you mean 'n7'? known: n0, n1")
    assert advice.endswith("... (30 in all)")


def test_nothing_near_gives_no_hint() -> None:
    assert choose_one_of("zzz", ["a"]) == "known: a"
