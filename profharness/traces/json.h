/* Find the values in a JSON text, and check its grammar. Reads never go beyond the text.
 *
 * The words that Kineto writes for numbers that are not finite, such as `inf`, are also accepted.
 */

#include <stdint.h>
#include <string.h>
#ifdef __SSE2__
#include <immintrin.h>
#endif
#if defined(__x86_64__) && defined(__GNUC__) && !defined(NARROW)
#define WIDE /* some functions are also compiled for AVX2, and used if the processor has it */
#endif

#define MAX_DEPTH 64 /* maximum depth of nested values */

typedef const unsigned char *Place;

typedef struct {
    Place begin, end; /* begin is NULL if there is no value */
} Slice;

static inline int is_string(Slice text) { return text.begin && *text.begin == '"'; }

/* The text before a value: separator, key and colon. Programs write the same text for each object,
 * so comparing it with a known lead saves the parsing of the key.
 */
#define MAX_LEAD 32
typedef struct {
    unsigned char text[MAX_LEAD];
    int length; /* 0 if the text is unknown */
    int number; /* number of the key, or -1 if the key is not requested */
} Lead;

#define MAX_LEADS 16 /* number of members of an object whose leads are kept */
#define SPELLINGS 2  /* leads per member; two, because two kinds of objects may alternate */
typedef Lead Leads[MAX_LEADS][SPELLINGS]; /* by the index of the member in its object */

typedef struct {
    Place stop;
    int unread; /* the number of the key whose object is skipped without reading it, or -1 */
    int asked;  /* the number of the key after which to call is_needless, or -1 */
    int (*is_needless)(const void *owner, const Slice *values);
    const void *owner;
    int odd; /* whether a key is repeated or contains an escape sequence */
} Text;

/* Return the position of the next quote, backslash or control character. */
static inline Place skip_plain(Place at, Place stop) {
#ifdef __SSE2__
    for (; stop - at >= 16; at += 16) {
        __m128i part = _mm_loadu_si128((const __m128i *)at);
        __m128i special = _mm_or_si128(_mm_cmpeq_epi8(part, _mm_set1_epi8('"')),
                                       _mm_cmpeq_epi8(part, _mm_set1_epi8('\\')));
        special =
            _mm_or_si128(special, _mm_cmpeq_epi8(_mm_min_epu8(part, _mm_set1_epi8(0x1f)), part));
        int places = _mm_movemask_epi8(special);
        if (places)
            return at + __builtin_ctz((unsigned)places);
    }
#endif
    while (at < stop && *at != '"' && *at != '\\' && *at >= 0x20)
        at++;
    return at;
}

/* Return the closing quote of the string whose first character is at `at`, or NULL. */
static inline Place string_end(Place at, Place stop, int *escaped) {
    for (;;) {
        at = skip_plain(at, stop);
        if (at < stop && *at == '"')
            return at;
        if (stop - at < 2 || *at != '\\')
            return NULL;
        *escaped = 1;
        if (at[1] != 'u') {
            if (!at[1] || !strchr("\"\\/bfnrt", at[1]))
                return NULL;
            at += 2;
            continue;
        }
        if (stop - at < 6)
            return NULL;
        for (int i = 2; i < 6; i++)
            if (!((at[i] >= '0' && at[i] <= '9') || ((at[i] | 32) >= 'a' && (at[i] | 32) <= 'f')))
                return NULL;
        at += 6;
    }
}

static inline Place skip_space(Place at, Place stop) {
#ifdef __SSE2__
    for (; stop - at >= 16 && *at <= ' '; at += 16) {
        __m128i part = _mm_loadu_si128((const __m128i *)at);
        __m128i space = _mm_or_si128(_mm_cmpeq_epi8(part, _mm_set1_epi8(' ')),
                                     _mm_cmpeq_epi8(part, _mm_set1_epi8('\n')));
        space = _mm_or_si128(space, _mm_cmpeq_epi8(part, _mm_set1_epi8('\r')));
        space = _mm_or_si128(space, _mm_cmpeq_epi8(part, _mm_set1_epi8('\t')));
        int others = ~_mm_movemask_epi8(space) & 0xffff;
        if (others)
            return at + __builtin_ctz((unsigned)others);
    }
#endif
    while (at < stop && (*at == ' ' || *at == '\n' || *at == '\r' || *at == '\t'))
        at++;
    return at;
}

static inline int is_digit(Place at, Place stop) { return at < stop && *at >= '0' && *at <= '9'; }

static inline Place skip_digits(Place at, Place stop) {
#ifdef __SSE2__
    for (; stop - at >= 16; at += 16) {
        __m128i value = _mm_sub_epi8(_mm_loadu_si128((const __m128i *)at), _mm_set1_epi8('0'));
        __m128i digits = _mm_cmpeq_epi8(_mm_min_epu8(value, _mm_set1_epi8(9)), value);
        int others = ~_mm_movemask_epi8(digits) & 0xffff;
        if (others)
            return at + __builtin_ctz((unsigned)others);
    }
#endif
    while (is_digit(at, stop))
        at++;
    return at;
}

static Place skip_number(Place at, Place stop) {
    if (at < stop && *at == '-')
        at++;
    if (!is_digit(at, stop))
        return NULL;
    at = *at == '0' ? at + 1 : skip_digits(at, stop);
    if (at < stop && *at == '.') {
        if (!is_digit(++at, stop))
            return NULL;
        at = skip_digits(at, stop);
    }
    if (at < stop && (*at | 32) == 'e') {
        at++;
        if (at < stop && (*at == '+' || *at == '-'))
            at++;
        if (!is_digit(at, stop))
            return NULL;
        while (is_digit(at, stop))
            at++;
    }
    return at;
}

/* Skip a word of JSON, or a word that Kineto writes for a number that is not finite. Return NULL if
 * there is no such word.
 */
static Place skip_word(Place at, Place stop) {
    static const char *const words[] = {"true", "false",    "null",     "NaN",
                                        "nan",  "Infinity", "infinity", "inf"};
    int negative = at < stop && *at == '-';
    at += negative;
    for (size_t i = negative ? 3 : 0; i < sizeof words / sizeof *words; i++) {
        size_t length = strlen(words[i]);
        if ((size_t)(stop - at) >= length && !memcmp(at, words[i], length))
            return at + length;
    }
    return NULL;
}

static Place skip_members(Text *text, Place at, int depth, const Slice *keys, int count,
                          Slice *values, Leads *leads);

static Place skip_pairs(Place at, Place stop, int64_t curly);
static Place skip_unread(Text *text, Place at);

/* Return the end of the value at `at`, or NULL if there is no complete value. */
static Place skip_value(Text *text, Place at, int depth) {
    Place stop = text->stop;
    int escaped = 0;
    if (at >= stop)
        return NULL;
    switch (*at) {
    case '"':
        at = string_end(at + 1, stop, &escaped);
        return at ? at + 1 : NULL;
    case '{':
        return skip_members(text, at, depth, NULL, 0, NULL, NULL);
    case '[':
        if (depth >= MAX_DEPTH)
            return NULL;
        at = skip_space(at + 1, stop);
        if (at < stop && *at == ']')
            return at + 1;
        for (;;) {
            at = skip_value(text, at, depth + 1);
            if (!at)
                return NULL;
            at = skip_space(at, stop);
            if (at >= stop)
                return NULL;
            if (*at == ']')
                return at + 1;
            if (*at != ',')
                return NULL;
            at = skip_space(at + 1, stop);
        }
    default:
        if (is_digit(at, stop) || (*at == '-' && is_digit(at + 1, stop)))
            return skip_number(at, stop);
        return skip_word(at, stop);
    }
}

/* Return the closing quote of the string at `at`, or NULL if the string does not equal the key. */
static inline Place key_end(Place at, Place stop, Slice key) {
    size_t length = key.end - key.begin;
    if ((size_t)(stop - at) < length + 2 || at[length + 1] != '"')
        return NULL;
    return memcmp(at + 1, key.begin, length) ? NULL : at + length + 1;
}

/* Return the index of the text that equals a string, or -1 if no text equals it. */
static inline int key_number(const Slice *texts, int count, Slice string) {
    if (!is_string(string))
        return -1;
    size_t length = string.end - string.begin - 2;
    for (int i = 0; i < count; i++)
        if ((size_t)(texts[i].end - texts[i].begin) == length &&
            *texts[i].begin == string.begin[1] && !memcmp(texts[i].begin, string.begin + 1, length))
            return i;
    return -1;
}

static inline int is_lead(const Lead *lead, Place at) {
#ifdef __SSE2__
    const __m128i *known = (const __m128i *)lead->text, *found = (const __m128i *)at;
    unsigned low = (unsigned)_mm_movemask_epi8(
        _mm_cmpeq_epi8(_mm_loadu_si128(known), _mm_loadu_si128(found)));
    unsigned high = (unsigned)_mm_movemask_epi8(
        _mm_cmpeq_epi8(_mm_loadu_si128(known + 1), _mm_loadu_si128(found + 1)));
    uint64_t wanted = (UINT64_C(1) << lead->length) - 1;
    return lead->length && !(wanted & ~(uint64_t)(low | high << 16));
#else
    return lead->length && !memcmp(lead->text, at, lead->length);
#endif
}

static inline const Lead *known_lead(const Lead *leads, Place at, Place stop) {
    for (int i = 0; i < SPELLINGS && stop - at > MAX_LEAD; i++)
        if (is_lead(leads + i, at) && at[leads[i].length] > ' ') /* no more white space follows */
            return leads + i;
    return NULL;
}

/* The next member of an object. */
typedef struct {
    Place value; /* NULL if there is no member */
    Place end;   /* end of the object, if the object ends here */
    int number;  /* number of the key, or -1 if the key is not requested */
} Member;

/* Return the member at `at`, which is after the opening brace or a value. `guess` is the most
 * likely number of its key. If `leads` is not NULL, the text before the value is stored in it.
 */
static Member parse_member(Text *text, Place at, int first, int guess, const Slice *keys, int count,
                           Lead *leads) {
    Member member = {NULL, NULL, guess};
    Place begin = at, stop = text->stop;
    int escaped = 0;
    at = skip_space(at, stop);
    if (at < stop && *at == '}') {
        member.end = at + 1;
        return member;
    }
    if (!first) {
        if (at >= stop || *at != ',')
            return member;
        at = skip_space(at + 1, stop);
    }
    if (at >= stop || *at != '"')
        return member;
    Place end = guess < count ? key_end(at, stop, keys[guess]) : NULL;
    if (!end) {
        end = string_end(at + 1, stop, &escaped);
        if (!end)
            return member;
        member.number = key_number(keys, count, (Slice){at, end + 1});
        text->odd |= count && escaped;
    }
    at = skip_space(end + 1, stop);
    if (at >= stop || *at != ':')
        return member;
    member.value = skip_space(at + 1, stop);
    size_t length = member.value - begin;
    if (leads && !escaped && length <= MAX_LEAD) {
        leads[1] = leads[0];
        memcpy(leads->text, begin, length);
        leads->length = (int)length, leads->number = member.number;
    }
    return member;
}

/* Return the end of the object at `at`, and store the value of each key in `keys`. `leads`
 * contains the leads in earlier objects of the same kind, or is NULL.
 */
static Place skip_members(Text *text, Place at, int depth, const Slice *keys, int count,
                          Slice *values, Leads *leads) {
    Place stop = text->stop;
    if (depth >= MAX_DEPTH)
        return NULL;
    if (count)
        memset(values, 0, count * sizeof *values);
    at++;
    for (int place = 0, guess = 0;; place++) {
        Lead *spellings = leads && place < MAX_LEADS ? (*leads)[place] : NULL;
        const Lead *lead = spellings ? known_lead(spellings, at, stop) : NULL;
        Member member = {0};
        if (lead)
            member.value = at + lead->length, member.number = lead->number;
        else
            member = parse_member(text, at, !place, guess, keys, count, spellings);
        if (!member.value)
            return member.end;
        Place value = member.value;
        int number = member.number;
        int unread = number >= 0 && number == text->unread && value < stop && *value == '{';
        at = unread ? skip_unread(text, value) : skip_value(text, value, depth + 1);
        if (!at)
            return NULL;
        if (number < 0)
            continue;
        guess = number + 1;
        text->odd |= values[number].begin != NULL;
        values[number] = (Slice){value, at};
        Place end = NULL;
        if (number == text->asked && text->is_needless(text->owner, values))
            end = skip_pairs(at, stop, 1);
        if (end)
            return end;
    }
}

/* The positions of special characters in a block of 64 characters, with one bit per character. In
 * `strings`, the bits from an opening quote to the character before the closing quote are set,
 * because each bit is the parity of the number of quotes up to its position.
 */
typedef struct {
    uint64_t strings, controls, opens, closes, begins, ends, escapes;
} Marks;

#ifdef __SSE2__
static inline uint64_t equal_16(const __m128i *parts, char character) {
    uint64_t places = 0;
    for (int i = 0; i < 4; i++)
        places |= (uint64_t)(unsigned)_mm_movemask_epi8(
                      _mm_cmpeq_epi8(parts[i], _mm_set1_epi8(character)))
                  << 16 * i;
    return places;
}

static inline Marks marks_by_16(Place at) {
    __m128i parts[4], low[4];
    for (int i = 0; i < 4; i++) {
        parts[i] = _mm_loadu_si128((const __m128i *)at + i);
        low[i] = _mm_subs_epu8(parts[i], _mm_set1_epi8(0x1f));
    }
    uint64_t strings = equal_16(parts, '"');
    for (int shift = 1; shift < 64; shift *= 2)
        strings ^= strings << shift;
    return (Marks){strings,
                   equal_16(low, 0),
                   equal_16(parts, '{'),
                   equal_16(parts, '}'),
                   equal_16(parts, '['),
                   equal_16(parts, ']'),
                   equal_16(parts, '\\')};
}
#endif

#ifdef WIDE
#define TARGET __attribute__((target("avx2,pclmul")))
TARGET static inline uint64_t equal_32(__m256i low, __m256i high, char character) {
    __m256i wanted = _mm256_set1_epi8(character);
    uint64_t first = (uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(low, wanted));
    uint64_t second = (uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(high, wanted));
    return first | second << 32;
}

TARGET static inline Marks marks_by_32(Place at) {
    __m256i low = _mm256_loadu_si256((const __m256i *)at);
    __m256i high = _mm256_loadu_si256((const __m256i *)at + 1);
    __m256i most = _mm256_set1_epi8(0x1f); /* the largest control character */
    __m128i quotes = _mm_cvtsi64_si128((int64_t)equal_32(low, high, '"'));
    __m128i sums = _mm_clmulepi64_si128(quotes, _mm_set1_epi8(-1), 0);
    return (Marks){(uint64_t)_mm_cvtsi128_si64(sums),
                   equal_32(_mm256_subs_epu8(low, most), _mm256_subs_epu8(high, most), 0),
                   equal_32(low, high, '{'),
                   equal_32(low, high, '}'),
                   equal_32(low, high, '['),
                   equal_32(low, high, ']'),
                   equal_32(low, high, '\\')};
}
#endif

static inline int count_of(uint64_t places) {
    places -= places >> 1 & UINT64_C(0x5555555555555555);
    places = (places & UINT64_C(0x3333333333333333)) + (places >> 2 & UINT64_C(0x3333333333333333));
    places = (places + (places >> 4)) & UINT64_C(0x0f0f0f0f0f0f0f0f);
    return (int)(places * UINT64_C(0x0101010101010101) >> 56);
}

/* Implement skip_pairs. `marks_of` finds the special characters in a block of 64 characters. */
static inline __attribute__((always_inline)) Place skip_pairs_by(Place at, Place stop,
                                                                 int64_t curly,
                                                                 Marks (*marks_of)(Place)) {
    uint64_t inside = 0; /* all bits are set if the block starts inside a string */
    int64_t square = 0;
    for (Place here = at; stop - here >= 64; here += 64) {
        Marks found = marks_of(here);
        if (found.escapes)
            return NULL;
        uint64_t strings = found.strings ^ inside;
        if (found.controls & strings)
            return NULL;
        uint64_t opens = found.opens & ~strings, marks = opens | (found.closes & ~strings);
        uint64_t begins = found.begins & ~strings, ends = found.ends & ~strings;
        for (; marks; marks &= marks - 1) {
            uint64_t mark = marks & -marks;
            curly += opens & mark ? 1 : -1;
            if (curly)
                continue;
            square += count_of(begins & (mark - 1)) - count_of(ends & (mark - 1));
            return square ? NULL : here + __builtin_ctzll(mark) + 1;
        }
        if (begins | ends)
            square += count_of(begins) - count_of(ends);
        inside = (uint64_t)((int64_t)strings >> 63);
    }
    return NULL;
}

#ifdef WIDE
TARGET static Place skip_pairs_by_32(Place at, Place stop, int64_t curly) {
    return skip_pairs_by(at, stop, curly, marks_by_32);
}
#endif

/* Return the end of an object that is not read. Only strings and pairs of brackets are checked.
 * `curly` is the number of objects open at `at`. Return NULL if the object is incomplete or the end
 * is unclear.
 */
static Place skip_pairs(Place at, Place stop, int64_t curly) {
#ifdef WIDE
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("pclmul"))
        return skip_pairs_by_32(at, stop, curly);
#endif
#ifdef __SSE2__
    return skip_pairs_by(at, stop, curly, marks_by_16);
#else
    (void)at, (void)stop, (void)curly;
    return NULL;
#endif
}

static Place skip_unread(Text *text, Place at) {
    Place end = skip_pairs(at, text->stop, 0);
    return end ? end : skip_value(text, at, 1);
}
