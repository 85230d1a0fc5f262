/* Splits words into groups of bytes and encodes these, decodes groups and merges them: piece by piece, while it is in the core's cache.
   byte_split.py does the same in numpy. */

#include "_kernel.h"

#define PIECE ((size_t)4096) /* words: all that is done with them stays in the nearest cache */

/* `shift` is how far a group is above the lowest bit of the word, rotated if it is. */
#define SPLIT(BITS, WIDTH)                                                                                                                 \
    HOT static void split##BITS##_##WIDTH(const char *restrict words, size_t count, int shift, int rotated, char *restrict to)             \
    {                                                                                                                                      \
        if (rotated && !shift)                                                                                                             \
            for (size_t i = 0; i < count; i++) {                                                                                           \
                uint##BITS##_t word = load##BITS(words, i);                                                                                \
                store##WIDTH(to, i, (uint##WIDTH##_t)((word << 1) | (word >> (BITS - 1))));                                                \
            }                                                                                                                              \
        else                                                                                                                               \
            for (size_t i = 0; i < count; i++)                                                                                             \
                store##WIDTH(to, i, (uint##WIDTH##_t)(load##BITS(words, i) >> (shift - rotated)));                                         \
    }

#define JOIN(BITS, WIDTH)                                                                                                                  \
    HOT static void join##BITS##_##WIDTH(const char *restrict group, size_t count, int shift, int is_first, char *restrict to)             \
    {                                                                                                                                      \
        if (is_first)                                                                                                                      \
            for (size_t i = 0; i < count; i++)                                                                                             \
                store##BITS(to, i, (uint##BITS##_t)((uint##BITS##_t)load##WIDTH(group, i) << shift));                                      \
        else                                                                                                                               \
            for (size_t i = 0; i < count; i++)                                                                                             \
                store##BITS(to, i, (uint##BITS##_t)(load##BITS(to, i) | (uint##BITS##_t)load##WIDTH(group, i) << shift));                  \
    }

#define ROTATE(BITS)                                                                                                                       \
    HOT static void rotate##BITS(const char *restrict from, size_t count, char *restrict to)                                               \
    {                                                                                                                                      \
        for (size_t i = 0; i < count; i++) {                                                                                               \
            uint##BITS##_t word = load##BITS(from, i);                                                                                     \
            store##BITS(to, i, (uint##BITS##_t)((word >> 1) | (word << (BITS - 1))));                                                      \
        }                                                                                                                                  \
    }

/* What most numbers are cut into: each word is written once. */
#define MERGE(NAME, BITS, WORD)                                                                                                            \
    HOT static void merge##NAME(const char *const from[], size_t count, int rotated, char *restrict to)                                    \
    {                                                                                                                                      \
        const char *restrict a = from[0], *restrict b = from[1], *restrict c = from[2], *restrict d = from[3];                             \
        (void)c, (void)d;                                                                                                                  \
        if (rotated)                                                                                                                       \
            for (size_t i = 0; i < count; i++) {                                                                                           \
                uint##BITS##_t word = (uint##BITS##_t)(WORD);                                                                              \
                store##BITS(to, i, (uint##BITS##_t)((word >> 1) | (word << (BITS - 1))));                                                  \
            }                                                                                                                              \
        else                                                                                                                               \
            for (size_t i = 0; i < count; i++)                                                                                             \
                store##BITS(to, i, (uint##BITS##_t)(WORD));                                                                                \
    }

MERGE(11, 16, (unsigned)load8(a, i) << 8 | load8(b, i))
MERGE(112, 32, (uint32_t)load8(a, i) << 24 | (uint32_t)load8(b, i) << 16 | load16(c, i))
MERGE(121, 32, (uint32_t)load8(a, i) << 24 | (uint32_t)load16(b, i) << 8 | load8(c, i))
MERGE(1111, 32, (uint32_t)load8(a, i) << 24 | (uint32_t)load8(b, i) << 16 | (uint32_t)load8(c, i) << 8 | load8(d, i))

typedef void (*MergeLoop)(const char *const[], size_t, int, char *restrict);

/* NULL: these groups are joined one after another. */
static MergeLoop merge_of(const Group *groups, int group_count)
{
    static const struct {
        int widths;
        MergeLoop merge;
    } forms[] = {{0x11, merge11}, {0x112, merge112}, {0x121, merge121}, {0x1111, merge1111}};
    int widths = 0;
    for (int g = 0; g < group_count && g < 5; g++)
        widths = widths << 4 | groups[g].width;
    for (size_t form = 0; form < sizeof forms / sizeof *forms; form++)
        if (forms[form].widths == widths)
            return forms[form].merge;
    return NULL;
}

#define BOTH(BITS, WIDTH) SPLIT(BITS, WIDTH) JOIN(BITS, WIDTH)
BOTH(8, 8)
BOTH(16, 8) BOTH(16, 16)
BOTH(32, 8) BOTH(32, 16) BOTH(32, 32)
BOTH(64, 8) BOTH(64, 16) BOTH(64, 32) BOTH(64, 64)
ROTATE(8) ROTATE(16) ROTATE(32) ROTATE(64)

typedef void (*SplitLoop)(const char *restrict, size_t, int, int, char *restrict);
typedef void (*JoinLoop)(const char *restrict, size_t, int, int, char *restrict);
typedef void (*RotateLoop)(const char *restrict, size_t, char *restrict);

static int log_of(int bytes)
{
    return bytes == 1 ? 0 : bytes == 2 ? 1 : bytes == 4 ? 2 : 3;
}

static void split(const char *words, size_t count, int item_bytes, int shift, int rotated, int width, char *to)
{
    static const SplitLoop loops[4][4] = {
        {split8_8},
        {split16_8, split16_16},
        {split32_8, split32_16, split32_32},
        {split64_8, split64_16, split64_32, split64_64},
    };
    loops[log_of(item_bytes)][log_of(width)](words, count, shift, rotated, to);
}

static void join(const char *group, size_t count, int item_bytes, int shift, int is_first, int width, char *to)
{
    static const JoinLoop loops[4][4] = {
        {join8_8},
        {join16_8, join16_16},
        {join32_8, join32_16, join32_32},
        {join64_8, join64_16, join64_32, join64_64},
    };
    loops[log_of(item_bytes)][log_of(width)](group, count, shift, is_first, to);
}

int are_groups_of(const Group *groups, int group_count, int item_bytes)
{
    int sum = 0;
    for (int g = 0; g < group_count; g++) {
        int width = groups[g].width;
        if ((width != 1 && width != 2 && width != 4 && width != 8) || (groups[g].how == HUFFMAN && width != 1))
            return 0;
        sum += width;
    }
    return sum == item_bytes && (item_bytes == 1 || item_bytes == 2 || item_bytes == 4 || item_bytes == 8);
}

/* What is decoded of a group and not merged yet. `frame` and `block` are used for a frame only, but for a constant piece. */
typedef struct {
    const char *at;
    size_t left; /* words */
    Frame frame;
    uint8_t block[HUFFMAN_BLOCK];
} Source;

/* Of a thread, which works on one block at a time: memory that is allocated for each block costs more in page faults than the work. */
static THREAD_LOCAL Source scratch[MAX_GROUPS];

size_t huffman_bound(size_t raw_size)
{
    return FRAME_HEADER + raw_size + BLOCK_HEADER * (raw_size / HUFFMAN_BLOCK + 1);
}

void encode_groups(const char *words, size_t count, int item_bytes, int rotated, Group *groups, int group_count)
{
    for (int g = 0; g < group_count; g++)
        groups[g].size = groups[g].how == HUFFMAN ? encode_frame_header(count, groups[g].bytes) : 0;
    for (size_t begin = 0, end; begin < count; begin = end) {
        end = count - begin < HUFFMAN_BLOCK ? count : begin + HUFFMAN_BLOCK;
        for (size_t at = begin, words_here; at < end; at += words_here) {
            words_here = end - at < PIECE ? end - at : PIECE;
            for (int g = 0, shift = 8 * item_bytes; g < group_count; g++) {
                shift -= 8 * groups[g].width;
                uint8_t *to = groups[g].how == HUFFMAN ? scratch[g].block + (at - begin)
                                                       : groups[g].bytes + at * (size_t)groups[g].width;
                split(words + at * (size_t)item_bytes, words_here, item_bytes, shift, rotated, groups[g].width, (char *)to);
            }
        }
        for (int g = 0; g < group_count; g++) {
            uint8_t *to = groups[g].bytes + groups[g].size;
            if (groups[g].how == HUFFMAN)
                groups[g].size += encode_huffman_block(scratch[g].block, end - begin, end == count, to);
            else
                groups[g].size = end * (size_t)groups[g].width;
        }
    }
}

/* Adds how often each byte occurs; returns the sum of the squares. */
HOT static uint32_t count_piece(const uint8_t *plane, size_t count, uint32_t occurrences[256])
{
    uint16_t even[256] = {0}, odd[256] = {0}; /* two, as neighbours are often alike, and a count waits for the one before */
    uint32_t squares = 0;
    size_t i = 0;
    for (; i + 2 <= count; i += 2) {
        even[plane[i]]++;
        odd[plane[i + 1]]++;
    }
    if (i < count)
        even[plane[i]]++;
    for (int symbol = 0; symbol < 256; symbol++) {
        uint32_t both = (uint32_t)even[symbol] + odd[symbol];
        occurrences[symbol] += both;
        squares += both * both;
    }
    return squares;
}

void survey_planes(const char *words, size_t count, int item_bytes, int rotated, const double *logarithms, Plane *planes, int places)
{
    for (int place = 0; place < places; place++) {
        uint8_t plane[1 + SURVEY_PIECE]; /* after the last byte of the piece before */
        uint32_t occurrences[256] = {0};
        Plane found = {0};
        for (size_t at = 0, words_here; at < count; at += words_here) {
            words_here = count - at < SURVEY_PIECE ? count - at : SURVEY_PIECE;
            split(words + at * (size_t)item_bytes, words_here, item_bytes, 8 * (item_bytes - 1 - place), rotated, 1, (char *)plane + 1);
            found.squares += count_piece(plane + 1, words_here, occurrences);
            for (size_t i = at ? 0 : 1; i < words_here; i++)
                found.repeats += plane[i] == plane[i + 1];
            plane[0] = plane[words_here];
        }
        for (uint64_t symbol = 0; symbol < 256; symbol++) {
            found.logarithms += logarithms[occurrences[symbol]];
            found.values += symbol * occurrences[symbol];
            found.values_squared += symbol * symbol * occurrences[symbol];
        }
        planes[place] = found;
    }
}

static int open_source(Source *source, const Group *group, size_t count)
{
    if (group->how == HUFFMAN) {
        source->left = 0;
        return begin_frame(&source->frame, group->bytes, group->size, count);
    }
    source->at = (const char *)group->bytes;
    source->left = count;
    if (group->how == CONSTANT) {
        source->at = (const char *)source->block;
        for (size_t i = 0; i < PIECE * (size_t)group->width; i++)
            source->block[i] = group->bytes[i % (size_t)group->width];
    }
    return 1;
}

static int decode_into(const Group *groups, int group_count, char *into, size_t count, int item_bytes, int rotated)
{
    static const RotateLoop rotations[4] = {rotate8, rotate16, rotate32, rotate64};
    const MergeLoop merge = merge_of(groups, group_count);
    const char *from[MAX_GROUPS];
    uint64_t merged[PIECE];
    for (size_t at = 0, words_here; at < count; at += words_here) {
        words_here = count - at < PIECE ? count - at : PIECE;
        for (int g = 0; g < group_count; g++) {
            Source *source = &scratch[g];
            if (groups[g].how == HUFFMAN && !source->left) {
                source->left = decode_block(&source->frame, source->block);
                source->at = (const char *)source->block;
                if (!source->left)
                    return g;
            }
            words_here = source->left < words_here ? source->left : words_here;
        }
        char *to = into + at * (size_t)item_bytes;
        for (int g = 0; merge && g < group_count; g++)
            from[g] = scratch[g].at;
        if (merge)
            merge(from, words_here, rotated, to);
        for (int g = 0, shift = 8 * item_bytes; g < group_count; g++) {
            shift -= 8 * groups[g].width;
            if (!merge)
                join(scratch[g].at, words_here, item_bytes, shift, !g, groups[g].width, (char *)merged);
            scratch[g].left -= words_here;
            scratch[g].at += groups[g].how == CONSTANT ? 0 : words_here * (size_t)groups[g].width;
        }
        if (!merge && rotated)
            rotations[log_of(item_bytes)]((const char *)merged, words_here, to);
        else if (!merge)
            memcpy(to, merged, words_here * (size_t)item_bytes);
    }
    return DECODED;
}

int decode_groups(const Group *groups, int group_count, char *into, size_t count, int item_bytes, int rotated)
{
    for (int g = 0; g < group_count; g++)
        if (!open_source(&scratch[g], &groups[g], count))
            return g;
    return decode_into(groups, group_count, into, count, item_bytes, rotated);
}
