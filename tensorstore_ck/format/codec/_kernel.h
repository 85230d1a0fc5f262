/* What the files of the kernel share. All sizes are in bytes unless a name says otherwise. */

#ifndef TENSORSTORE_CK_KERNEL_H
#define TENSORSTORE_CK_KERNEL_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* The compiler makes two forms of a hot loop, and the processor that runs it chooses: wheels are built for the oldest x86-64. NEON is in
   every 64-bit ARM. With "arch=haswell" the same loops were half as fast on Zen 4. */
#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GLIBC__) && defined(__has_attribute)
#if __has_attribute(target_clones)
#define HOT __attribute__((target_clones("avx2", "default")))
#endif
#endif
#ifndef HOT
#define HOT
#endif

/* As HOT, for shifts by numbers that are computed: BMI2 does them in one step. GCC 12 is the first that chooses by the level. */
#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12
#define HOT_SHIFTS __attribute__((target_clones("arch=x86-64-v3", "default")))
#else
#define HOT_SHIFTS HOT
#endif

/* Before a loop whose iterations do not depend on each other, whatever its pointers are. */
#if defined(__GNUC__) && !defined(__clang__)
#define INDEPENDENT _Pragma("GCC ivdep")
#else
#define INDEPENDENT
#endif

#ifdef _MSC_VER
#include <intrin.h>
#define THREAD_LOCAL __declspec(thread)
#define PREFETCH(at) ((void)0)
static inline int TRAILING_ZEROS(uint64_t bits)
{
    unsigned long zeros;
    _BitScanForward64(&zeros, bits);
    return (int)zeros;
}
#else
#define THREAD_LOCAL _Thread_local
#define PREFETCH __builtin_prefetch
#define TRAILING_ZEROS __builtin_ctzll
#endif

#ifdef __GNUC__
#define INLINE static inline __attribute__((always_inline, unused))
#else
#define INLINE static inline
#endif

/* Words may lie at any address. */
#define ACCESS(BITS)                                                                                                                       \
    INLINE uint##BITS##_t load##BITS(const char *from, size_t i)                                                                           \
    {                                                                                                                                      \
        uint##BITS##_t word;                                                                                                               \
        memcpy(&word, from + i * sizeof word, sizeof word);                                                                                \
        return word;                                                                                                                       \
    }                                                                                                                                      \
                                                                                                                                           \
    INLINE void store##BITS(char *to, size_t i, uint##BITS##_t word)                                                                       \
    {                                                                                                                                      \
        memcpy(to + i * sizeof word, &word, sizeof word);                                                                                  \
    }

ACCESS(8)
ACCESS(16)
ACCESS(32)
ACCESS(64)

#define HUFFMAN_BLOCK ((size_t)1 << 17) /* of raw bytes, the most that zstd admits */
#define FRAME_HEADER 10
#define BLOCK_HEADER 3
#define MAX_GROUPS 8
#define SURVEY_PIECE ((size_t)512) /* words: what is in a row in a sample, see entropy.py */

#define MAX_BITS 11 /* of a code word, the most that zstd admits */
#define STREAMS 4   /* into which a block is cut */

/* _huffman_code.c: the bits of each symbol that occurs, of two or more; returns the most of them. */
unsigned choose_lengths(const uint32_t counts[256], uint8_t lengths[256]);
/* The size of the code's description, at most 128 + 1; 0 if it has none. */
size_t describe_code(const uint8_t lengths[256], unsigned longest, uint8_t *to);

/* _huffman_encode.c: writes the block of a zstd frame, with its header: at most BLOCK_HEADER + size bytes. Returns what it wrote. */
size_t encode_huffman_block(const uint8_t *raw, size_t size, int is_last, uint8_t *to);
size_t encode_frame_header(size_t size, uint8_t *to);

/* _huffman_decode.c: a zstd frame whose blocks have no matches, block by block. */
#define STEP_BITS MAX_BITS
#define STEPS ((size_t)1 << STEP_BITS)

typedef struct {
    const uint8_t *at, *end;
    int has_code;
    uint16_t symbols[STEPS];  /* by the next bits: the symbol, and its bits in the lowest byte */
    uint64_t steps[2 * STEPS]; /* steps[2^n + the next n bits]: the bits, up to six symbols, and how many */
} Frame;

/* False for a frame that says something else, or is of another kind: a caller asks zstd itself. */
int begin_frame(Frame *frame, const uint8_t *stored, size_t stored_size, size_t raw_size);
/* The raw bytes of the next block, at most HUFFMAN_BLOCK; `into` has space for these. 0: see `begin_frame`. */
size_t decode_block(Frame *frame, uint8_t *into);

/* _planes.c: see byte_planes.py. */
enum { RAW, HUFFMAN, CONSTANT };

typedef struct {
    int width, how;
    uint8_t *bytes; /* encoded, or to be */
    size_t size;    /* of them */
} Group;

/* Whether their widths sum up to a word's. */
int are_groups_of(const Group *groups, int group_count, int item_bytes);
/* What an encoded group has at most. */
size_t huffman_bound(size_t raw_size);
/* Encodes into `bytes` of each group, and sets `size`. The first group has the highest bytes. */
void encode_groups(const char *words, size_t count, int item_bytes, int rotated, Group *groups, int group_count);
/* Of the bytes at one place of the words. */
typedef struct {
    double logarithms; /* of how often each byte occurs, times how often, in sum */
    uint64_t repeats;  /* how many are equal to the one before */
    uint64_t squares;  /* of the occurrences in each piece, in sum: as many repeats as by chance, times the words of a piece */
    uint64_t values, values_squared; /* the bytes as numbers, and their squares, in sum */
} Plane;

/* Of so many places, from the highest on. `logarithms` has each number up to `count`, times its binary logarithm. */
void survey_planes(const char *words, size_t count, int item_bytes, int rotated, const double *logarithms, Plane *planes, int places);
/* Writes each word once. Returns DECODED, or the number of a group that is no frame that this kernel decodes. */
enum { DECODED = -1 };
int decode_groups(const Group *groups, int group_count, char *into, size_t count, int item_bytes, int rotated);

/* _differences.c: see delta.py; by the binary logarithm of a word's bytes. For at most 2^32 - 1 words; `base` may be where the words go.
   Nobody may change `base` meanwhile: it is read twice, and its words say where others go. */
typedef void (*DifferenceLoop)(const char *from, const char *base, char *into, size_t count);
extern const DifferenceLoop take_loops[4], add_loops[4];

/* _roundings.c: see cast.py. `into` is no part of `masters`. */
void round_words(const char *masters, size_t count, char *into);
int are_roundings(const char *masters, size_t count, const char *words);

/* _changes.c. Sums of words, and of those sums, in two lanes: the order counts, and no single bit can change
   unnoticed; of several changes at once most are noticed. Never stored: they watch over memory of this process alone. */
typedef uint64_t Pair __attribute__((vector_size(16)));
typedef struct {
    Pair words, sums;
} Sum;

typedef struct {
    const char *words, *base;
    char *gaps, *values;
    char *into; /* NULL, or `base`, whose words become the block's as they are found, up to the limit */
    size_t limit, count; /* capacity in changed words; how many were found: above the limit, at least */
    size_t next;         /* behind the last changed word */
    int is_float;
    Sum of_words, of_base;
} Search;

/* Goes on from byte `at`; before the end of the block, `end` is a multiple of 64. */
typedef void (*FindLoop)(Search *search, size_t at, size_t end);
typedef void (*ApplyLoop)(const char *gaps, const char *values, char *into, size_t count, int is_float);
extern const FindLoop find_loops[4];
extern const ApplyLoop apply_loops[4];
/* Whether all gaps lead to words of `words`: checked before any is written. */
int gaps_fit(const char *gaps, size_t count, size_t words);

#endif
