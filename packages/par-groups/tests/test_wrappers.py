from par_groups import original_name


def test_original_name_drops_prefixes_of_wrappers():
    assert original_name("_orig_mod.blocks.0._checkpoint_wrapped_module._orig_mod.w") == "blocks.0.w"
    assert original_name("blocks.0.origin_mod.w") == "blocks.0.origin_mod.w"
