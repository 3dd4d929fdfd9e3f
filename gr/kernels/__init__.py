"""Operations with a reference that is their specification, one folder each."""
