/* Differences sorted by the exponents of their base (see delta.py, which says the same in numpy, 6 times slower).

   A counting sort: one pass counts the exponents, another one writes each difference to its place, or takes it from there. Vectors, and
   several parts of the words in turns, made the second pass slower. */

#include "_kernel.h"

#define TURNS 8

#define WORD(BITS)                                                                                                                         \
    INLINE unsigned exponent##BITS(uint##BITS##_t word)                                                                                    \
    {                                                                                                                                      \
        return (unsigned)((uint##BITS##_t)(word << 1) >> (BITS - 8));                                                                      \
    }                                                                                                                                      \
                                                                                                                                           \
    /* Floats as integers in their order, in two's complement; its own inverse. */                                                         \
    INLINE uint##BITS##_t ordered##BITS(uint##BITS##_t word)                                                                               \
    {                                                                                                                                      \
        uint##BITS##_t sign = (uint##BITS##_t)(0 - (word >> (BITS - 1)));                                                                  \
        return word ^ (uint##BITS##_t)(sign >> 1);                                                                                         \
    }                                                                                                                                      \
                                                                                                                                           \
    INLINE uint##BITS##_t zigzag##BITS(uint##BITS##_t word, uint##BITS##_t base)                                                           \
    {                                                                                                                                      \
        uint##BITS##_t difference = (uint##BITS##_t)(ordered##BITS(word) - ordered##BITS(base));                                           \
        return (uint##BITS##_t)(difference << 1) ^ (uint##BITS##_t)(0 - (difference >> (BITS - 1)));                                       \
    }                                                                                                                                      \
                                                                                                                                           \
    INLINE uint##BITS##_t plus##BITS(uint##BITS##_t base, uint##BITS##_t zigzag)                                                           \
    {                                                                                                                                      \
        uint##BITS##_t difference = (uint##BITS##_t)((zigzag >> 1) ^ (uint##BITS##_t)(0 - (zigzag & 1)));                                  \
        return ordered##BITS((uint##BITS##_t)(ordered##BITS(base) + difference));                                                          \
    }                                                                                                                                      \
                                                                                                                                           \
    static void starts##BITS(const char *base, size_t count, uint32_t starts[256])                                                         \
    {                                                                                                                                      \
        uint32_t counts[TURNS][256]; /* several, as neighbours are often alike, and a count waits for the one before */                    \
        size_t i = 0;                                                                                                                      \
        memset(counts, 0, sizeof counts);                                                                                                  \
        for (; i + TURNS <= count; i += TURNS)                                                                                             \
            for (size_t turn = 0; turn < TURNS; turn++)                                                                                    \
                counts[turn][exponent##BITS(load##BITS(base, i + turn))]++;                                                                \
        for (; i < count; i++)                                                                                                             \
            counts[0][exponent##BITS(load##BITS(base, i))]++;                                                                              \
        for (uint32_t e = 0, start = 0; e < 256; e++) {                                                                                    \
            starts[e] = start;                                                                                                             \
            for (size_t turn = 0; turn < TURNS; turn++)                                                                                    \
                start += counts[turn][e];                                                                                                  \
        }                                                                                                                                  \
    }                                                                                                                                      \
                                                                                                                                           \
    static void take##BITS(const char *words, const char *base, char *into, size_t count)                                                  \
    {                                                                                                                                      \
        uint32_t at[256];                                                                                                                  \
        size_t i = 0;                                                                                                                      \
        starts##BITS(base, count, at);                                                                                                     \
        for (; i + 2 <= count; i += 2) { /* two at a time: a place is read after the one before was written */                             \
            uint##BITS##_t one = load##BITS(base, i), other = load##BITS(base, i + 1);                                                     \
            unsigned first = exponent##BITS(one), second = exponent##BITS(other);                                                          \
            uint32_t place = at[first], next = at[second] + (first == second);                                                             \
            at[first] = place + 1;                                                                                                         \
            at[second] = next + 1;                                                                                                         \
            store##BITS(into, place, zigzag##BITS(load##BITS(words, i), one));                                                             \
            store##BITS(into, next, zigzag##BITS(load##BITS(words, i + 1), other));                                                        \
        }                                                                                                                                  \
        if (i < count) {                                                                                                                   \
            uint##BITS##_t other = load##BITS(base, i);                                                                                    \
            store##BITS(into, at[exponent##BITS(other)], zigzag##BITS(load##BITS(words, i), other));                                       \
        }                                                                                                                                  \
    }                                                                                                                                      \
                                                                                                                                           \
    static void add##BITS(const char *sorted, const char *base, char *into, size_t count)                                                  \
    {                                                                                                                                      \
        uint32_t at[256];                                                                                                                  \
        size_t i = 0;                                                                                                                      \
        starts##BITS(base, count, at);                                                                                                     \
        for (; i + 2 <= count; i += 2) {                                                                                                   \
            uint##BITS##_t one = load##BITS(base, i), other = load##BITS(base, i + 1);                                                     \
            unsigned first = exponent##BITS(one), second = exponent##BITS(other);                                                          \
            uint32_t place = at[first], next = at[second] + (first == second);                                                             \
            at[first] = place + 1;                                                                                                         \
            at[second] = next + 1;                                                                                                         \
            one = plus##BITS(one, load##BITS(sorted, place));                                                                              \
            other = plus##BITS(other, load##BITS(sorted, next));                                                                           \
            store##BITS(into, i, one);                                                                                                     \
            store##BITS(into, i + 1, other);                                                                                               \
        }                                                                                                                                  \
        if (i < count) {                                                                                                                   \
            uint##BITS##_t other = load##BITS(base, i);                                                                                    \
            store##BITS(into, i, plus##BITS(other, load##BITS(sorted, at[exponent##BITS(other)])));                                        \
        }                                                                                                                                  \
    }

WORD(8)
WORD(16)
WORD(32)
WORD(64)

const DifferenceLoop take_loops[4] = {take8, take16, take32, take64};
const DifferenceLoop add_loops[4] = {add8, add16, add32, add64};
