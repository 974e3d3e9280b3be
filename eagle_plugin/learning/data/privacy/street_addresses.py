"""Street addresses with a number, in the order of words of English, German, French, Spanish, Portuguese and Italian."""

from __future__ import annotations

import re
from collections.abc import Iterator

from eagle_plugin.learning.data.privacy.patterns import Finding, find_patterns, find_windows, pattern

_WORD = r"[A-Z][\w'.-]*"
_CITY = rf"(?:,[ \t]*{_WORD}(?: {_WORD})?)"
_UNIT = r"(?:,?[ \t]+(?:Apt|Apartment|Suite|Ste|Unit|Flat|#)\.?\s*\w+)"
_TAIL = rf"{_UNIT}?(?:{_CITY}(?:,?[ \t]+[A-Z]{{2}})?(?:[ \t]+\d{{5}}(?:-\d{{4}})?)?)?"
_STREET = (
    "Street|St|Avenue|Ave|Road|Rd|Boulevard|Blvd|Lane|Ln|Drive|Dr|Court|Ct|Terrace|Way|Place|Pl|Square|Parkway|Pkwy|"
    "Highway|Hwy|Circle|Crescent|Close|Row|Marg|Nagar|Chowk|Mews"
)
# Less common suffixes of publication 28 of the US Postal Service; most are also ordinary words.
_RARE_STREET = (
    "Alley|Annex|Arcade|Bayou|Beach|Bend|Bluffs?|Bottom|Branch|Bridge|Brooks?|Burgs?|Bypass|Camp|Canyon|Cape|Causeway|Centers?|"
    "Circles?|Cliffs?|Club|Commons?|Corners?|Course|Courts?|Coves?|Creek|Crest|Crossing|Crossroads?|Curve|Dale|Dam|Divide|"
    "Drives?|Estates?|Expressway|Extensions?|Falls?|Ferry|Fields?|Flats?|Fords?|Forest|Forges?|Forks?|Fort|Freeway|Ganj|Gardens?|"
    "Gateway|Glens?|Greens?|Groves?|Harbors?|Haven|Heights|Hills?|Hollow|Inlet|Islands?|Isle|Junctions?|Keys?|Knolls?|Lakes?|"
    "Land|Landing|Lights?|Loaf|Locks?|Lodge|Loop|Mall|Manors?|Meadows?|Mews|Mills?|Mission|Motorway|Mount|Mountains?|Neck|"
    "Orchard|Oval|Overpass|Parks?|Parkways|Pass|Passage|Path|Pike|Pines?|Plains?|Plazas?|Points?|Ports?|Prairie|Radial|Ramp|"
    "Ranch|Rapids?|Rest|Ridges?|River|Roads?|Route|Rue|Run|Shoals?|Shores?|Skyway|Springs?|Spurs?|Squares?|Station|Stravenue|"
    "Stream|Streets?|Summit|Throughway|Trace|Track|Trafficway|Trail|Tunnel|Turnpike|Underpass|Unions?|Valleys?|Via|Viaduct|"
    "Views?|Villages?|Ville|Vista|Walks?|Wall|Ways?|Wells?|Wharf|Zila"
)
_PLACE = (
    rf"(?P<tail>{_UNIT}?(?:(?:,[ \t]*|\n){_WORD}(?:[ \t]{_WORD}){{0,2}},?[ \t]+"
    r"(?:[A-Z]{2}[ \t]+\d{5}(?:-\d{4})?|[A-Z]{1,2}\d[A-Z\d]?[ \t]\d[A-Z]{2}))?)"
)
_DE_PLACE = r"(?:,?\s*\d{5}\s+[A-ZÄÖÜ]\w+)"
# A postal code with its place, after a street of another language than English.
_POSTAL = (
    r"(?:[ \t]*[,\n–-][ \t]*(?:[A-Z]{1,2}-)?(?:\d{4,5}(?:-\d{3})?|\d\d-\d{3})[ \t]+"
    r"[A-ZÀ-ÖØ-Þ][\w'’-]+(?:[ \t](?:[a-z]{2,3}[ \t])?[A-ZÀ-ÖØ-Þ][\w'’-]+){0,2}(?:[ \t]*\([A-Z]{2}\))?)?"
)
_DE_NUMBER = r"\d{1,4}\s?[a-z]?(?:\s?[/-]\s?\d{1,3})?\b"
_CAP = r"[A-ZÀ-ÖØ-Þ][\w'’.-]*"
_LINK = r"(?:d[aeio]s?|del|de[ \t]l[aeo]s?|della?|dei|degli|delle|l[aeo]s?|e|y|[Ss]ão|San|du)"
_NAME = rf"(?:{_LINK}[ \t]+|[dl]['’][ \t]?)*{_CAP}(?:[ \t]+(?:{_LINK}[ \t]+|[dl]['’])*{_CAP}){{0,4}}"
_NUMBER = r"\d{1,5}(?:[ \t]?[A-Za-z]\b(?!\.C))?(?:[/-]\d{1,4})?(?![\w%€$]|[.,]\d|[ \t]?[ad]\.?[ \t]?C\b)"
_COMMA = r"(?:[ \t]*,[ \t]*(?:[nN][º°ªo.]{1,2}[ \t]*)?|[ \t]+[nN](?:[º°ª.]|o\.?)[ \t]*)"
_ROOM = (
    r"(?:[ \t]*,?[ \t]*(?:[Pp]iso|[Pp]uerta|[Pp]ta\.?|[Aa]pto?\.?|[Aa]partamento|[Aa]ppartamento|[Pp]iano|"
    r"[Ii]nt(?:erno|erior)?\.?|"
    r"[Ee]sc\.?|[Bb]loco|[Ss]ala|[Ee]dif[ií]cio|[Cc]asa|[Pp]lanta)[ \t]*\w+)?"
)
# Words that begin an address in Spanish, Portuguese or Italian and little else.
_ROAD = (
    "rua|avenida|calle|plaza|viale|piazza|Rua|R\\.|Avenida|Avinguda|Av\\.?|Avda\\.?|Travessa|Tv\\.|Alameda|Praça|Pça\\.|"
    "Pr\\.|Rodovia|Rod\\.|Ladeira|Viela|Calle|Cl\\.|C/|C\\.(?=[ \\t]?de)|Callej[óo]n|Carrer|Paseo|Passeig|Pº|"
    "P\\.º|Plaza|Pl\\.|Pza\\.|Cuesta|Glorieta|Pasaje|Pasadizo|Rambla|Traves[íi]a|"
    "Via|Viale|V\\.le|Piazza|P\\.za|Piazzale|Vicolo|Largo|Lungotevere|Urbanizaci[óo]n|Cañada|Sendero|Vial|Camino|Ronda"
)
# Words that are often something else; the number has to follow a comma or "nº".
_WEAK_ROAD = (
    "Aeroporto|Área|Campo|Chácara|Colônia|Condomínio|Conjunto|Distrito|Esplanada|Estação|Estrada|Favela|Fazenda|Feira|Jardim|"
    "Lago|Lagoa|Loteamento|Morro|Núcleo|Parque|Passarela|Pátio|Praia|Quadra|Recanto|Residencial|Setor|Sítio|Trecho|Trevo|Vale|"
    "Vereda|Viaduto|Vila|Acceso|Corso|Strada|Borgo|Contrada|Rotonda|Incrocio|Stretto|Canale|Carrera|Corredor"
)
_ADDRESS_BEFORE = re.compile(
    r"(?:address|addr|deliver\w*|ship\w*|send|parcel|mail|lives?|living|liv(?:e|ing) at|reside\w*|located|moved|"
    r"home|office)"
    r"\b[^.!?\n]{0,24}(?:\n[ \t]*)?$|^\s*$",
    re.IGNORECASE,
)


def _is_rare_street(match: re.Match[str]) -> bool:
    """A suffix that is also an ordinary word needs a unit or a city after it, or a word about addresses before it."""
    return bool(match["tail"]) or bool(_ADDRESS_BEFORE.search(match.string[max(0, match.start() - 60) : match.start()]))


def _has_no_year(match: re.Match[str]) -> bool:
    """ "Via Appia 1998" is about a year; a house number with a comma before it can be 1998."""
    return _begins_word(match) and (
        bool(match["comma"].strip()) or not re.fullmatch(r"(?:1[5-9]|20)\d\d", match["number"])
    )


def _is_german_street(match: re.Match[str]) -> bool:
    """Words in -ring are also English: these need the number of a German place, or an article before them."""
    if not match["street"].endswith("ring") or match["street"].endswith("-ring") or match["place"]:
        return True
    before = match.string[max(0, match.start() - 20) : match.start()]
    return bool(re.search(r"(?i:(?:\b(?:der|dem|am|im|an|wohne)\s+|(?:adresse|anschrift):?\s*))$", before))


def _begins_word(match: re.Match[str]) -> bool:
    before = match.string[max(0, match.start() - 1) : match.start()]
    return not (before.isalnum() or before == "_" or before == ".")


# Tried at each number of the text.
_NUMBER_FIRST = (
    pattern(
        "STREET_ADDRESS",
        "",
        rf"\d{{1,5}}[A-Za-z]?(?:/\d{{1,4}})?,?[ \t]+(?:{_WORD}[ \t]+){{1,4}}(?:{_STREET})\b\.?{_TAIL}",
    ),
    pattern(
        "STREET_ADDRESS",
        "",
        rf"\d{{1,5}}[A-Za-z]?,?[ \t]+(?:{_WORD}[ \t]+){{1,3}}(?:{_RARE_STREET})\b{_PLACE}",
        _is_rare_street,
    ),
    # The number has a line of its own in India.
    pattern(
        "STREET_ADDRESS",
        "",
        rf"\d{{1,4}}(?:/\d{{1,4}})?,?(?:[ \t]*\n|[ \t]+)(?:{_WORD}[ \t]+){{1,3}}(?:Road|Street|Marg|Nagar|Chowk|"
        rf"Lane|Path|Circle|"
        r"Ganj|Zila)\b",
    ),
    # Any street, if a postal code of Britain or the United States follows.
    pattern(
        "STREET_ADDRESS",
        "",
        rf"\d{{1,4}}[A-Za-z]?,?[ \t]+(?:{_WORD},?[ \t\n]+){{2,8}}(?:[A-Z]{{1,2}}\d[A-Z\d]?[ \t]\d[A-Z]{{2}}|"
        r"[A-Z]{2}[ \t]+\d{5}(?:-\d{4})?)\b",
    ),
    pattern(
        "STREET_ADDRESS",
        "",
        r"\d{1,4}(?:\s?(?:bis|ter|[A-D]\b))?,?\s+(?i:rue|avenue|av\.|boulevard|bd\.?|place|chemin|impasse|allées?|quai|cours|route|"
        r"passage|square|sentier)\s+(?:d[eu]s?\s+|l[ae]s?\s+|[dl]['’])*"
        r"[A-ZÀ-Ý][\w'’-]*(?:\s[A-ZÀ-Ý][\w'’-]*)*(?:,?\s*\d{5}\s+[A-ZÀ-Ý][\w-]*)?" + _POSTAL,
    ),
)
# Searched around each number. They begin with letters, not with an assertion: then the search for them is fast.
_STREET_FIRST = (
    pattern(
        "STREET_ADDRESS",
        "flat studio apt unit",
        rf"(?:Flat|Studio|Apt|Unit)[ \t]+\d{{1,4}}[A-Za-z]?,?[ \t]*\n?(?:{_WORD}[ \t]+){{1,3}}(?:{_RARE_STREET}|"
        rf"{_STREET})\b{_PLACE}",
        _is_rare_street,
    ),
    pattern(
        "STREET_ADDRESS",
        "no",
        rf"(?:H\.?|House)[ \t]*[Nn]o\.?[ \t]*\d[\w/-]*[, \t\n]+(?:{_WORD}[ \t]*){{1,4}}",
        _begins_word,
    ),
    pattern("STREET_ADDRESS", "box", rf"(?i:\bP\.?\s?O\.?\s?Box)\s+\d{{1,6}}{_TAIL}"),
    pattern(
        "STREET_ADDRESS",
        "straße strasse str. platz allee gasse weg ring damm ufer steig stieg chaussee promenade pfad",
        r"(?<!\w)(?P<street>(?:[A-ZÄÖÜ][\w.-]*[ \t-]){0,2}(?:[A-ZÄÖÜ][\w-]*?(?:straße|strasse|str\.|platz|allee|"
        r"gasse|weg|[Rr]ing|damm|"
        r"ufer|steig|stieg|chaussee|promenade|pfad)|(?:[A-ZÄÖÜ]\w+[ -])+(?:Straße|Strasse|Str\.|Platz|Allee|"
        r"Gasse|Weg|Damm|Ufer|Steig|"
        rf"Chaussee)))[ \t]+(?!(?:19|20)\d\d\b(?!,?\s*\d{{5}})){_DE_NUMBER}(?P<place>{_DE_PLACE}?)",
        _is_german_street,
    ),
    pattern(
        "STREET_ADDRESS",
        "am an auf im in unter zum zur",
        rf"(?:Am|An de[rnm]|Auf de[rnm]|Im|In de[rnm]|Unter den|Zum|"
        rf"Zur)(?:[ \t][A-ZÄÖÜ][\w-]+){{1,3}}[ \t]+{_DE_NUMBER}{_DE_PLACE}",
        _begins_word,
    ),
    pattern(
        "STREET_ADDRESS",
        " ".join(re.sub(r"\\\.\?|[\[(].*|\\", "", road).lower() for road in _ROAD.split("|")),
        rf"(?:{_ROAD})[ \t]*{_NAME}(?P<comma>{_COMMA}|[ \t]+)(?P<number>{_NUMBER}){_ROOM}{_POSTAL}",
        _has_no_year,
    ),
    pattern(
        "STREET_ADDRESS",
        _WEAK_ROAD.lower().replace("|", " "),
        rf"(?:{_WEAK_ROAD})[ \t]+{_NAME}{_COMMA}{_NUMBER}{_ROOM}{_POSTAL}",
        _begins_word,
    ),
    # Colombia: the street and its cross street are numbers.
    pattern(
        "STREET_ADDRESS",
        "calle carrera cra kra cl. diagonal transversal",
        r"(?<!\w)(?i:calle|cl\.?|carrera|cra\.?|kra\.?|diagonal|"
        r"transversal)[ \t]+\d{1,3}[A-Za-z]?(?:[ \t]bis)?[ \t]*(?:#|[nN][o°º.]{1,2})[ \t]*"
        r"\d{1,3}[A-Za-z]?[ \t]*-[ \t]*\d{1,3}",
    ),
)
_NUMBERS = re.compile(r"\d+")
_MARGIN = 80  # characters on each side of a number


def find_street_addresses(text: str) -> Iterator[Finding]:
    """Yield the street addresses in the text, each of which has a number."""
    for number in _NUMBERS.finditer(text):
        start = number.start()
        if start and (text[start - 1].isalnum() or text[start - 1] in "._,"):
            continue
        for one in _NUMBER_FIRST:
            match = one.regex.match(text, start)
            if match and one.accept(match):
                yield Finding(one.type, *match.span())
    for start, stop in find_windows(_NUMBERS, text, _MARGIN, lines=False):
        yield from find_patterns(_STREET_FIRST, text, start, stop)
