BEGIN TRANSACTION;
CREATE TABLE adapter_aliases (
        tenant TEXT NOT NULL,
        name TEXT NOT NULL,
        alias TEXT NOT NULL,
        targets TEXT NOT NULL,
        follows_pushes INTEGER NOT NULL,
        history TEXT NOT NULL,
        salt TEXT NOT NULL,
        pinned INTEGER NOT NULL,
        updated_at REAL NOT NULL,
        PRIMARY KEY (tenant, name, alias)
    ) STRICT;
INSERT INTO "adapter_aliases" VALUES('acme','voice','latest','{"3": 100}',1,'[[{"1": 100}, true], [{"2": 100}, true]]','7b0b4678b27448b7801262b518aacb67',0,1790000002.25);
INSERT INTO "adapter_aliases" VALUES('acme','a.b-c','latest','{"1": 100}',1,'[]','d7d840431b6a495c88e89a20d0a7aba0',0,1790000005.25);
INSERT INTO "adapter_aliases" VALUES('acme','a_b','latest','{"2": 100}',1,'[]','45b11696fd744a19b8724b37faa0de69',0,1790000007.25);
INSERT INTO "adapter_aliases" VALUES('beta','voice','latest','{"1": 100}',1,'[]','3c25a917e0634d5d9e6f151c666edc0e',0,1790000009.25);
INSERT INTO "adapter_aliases" VALUES('acme','voice','prod','{"1": 90, "2": 10}',0,'[[{"1": 100}, false]]','092e529dff724004a6dc73b1e73d16ba',1,1790000004.25);
CREATE TABLE adapter_changes (
        change_id INTEGER PRIMARY KEY AUTOINCREMENT,
        nonce TEXT NOT NULL,
        tenant TEXT NOT NULL,
        name TEXT NOT NULL,
        orphaned TEXT NOT NULL,
        moved_pin INTEGER NOT NULL
    ) STRICT;
INSERT INTO "adapter_changes" VALUES(1,'fef74f737618cc252368cfe89647291b','','','[]',0);
INSERT INTO "adapter_changes" VALUES(2,'8b807e0fbdde4788a03734ab0f0cbebf','acme','voice','[]',0);
INSERT INTO "adapter_changes" VALUES(3,'df9927c538f54dbdb5202c3964666959','acme','voice','[]',0);
INSERT INTO "adapter_changes" VALUES(4,'487e3e6b30874a78906edf8528102251','acme','voice','[]',0);
INSERT INTO "adapter_changes" VALUES(5,'ae2b1f12112d4fdfa948a21b3e0d5202','acme','voice','[]',0);
INSERT INTO "adapter_changes" VALUES(6,'658c1941aff94c32bcff4e4a50f89bfe','acme','voice','[]',0);
INSERT INTO "adapter_changes" VALUES(7,'91b10c2c0bbf4597aa0693975ef75ae8','acme','a.b-c','[]',0);
INSERT INTO "adapter_changes" VALUES(8,'30be32886da94485ace1f5df88b73a87','acme','a_b','[]',0);
INSERT INTO "adapter_changes" VALUES(9,'fb5f11c19f5a48769e7b687d0c9655a5','acme','a_b','[]',0);
INSERT INTO "adapter_changes" VALUES(10,'d2f674779b2c4c6c8ce461f591876f75','acme','a_b','["0000000000000000000000000000000000000000000000000000000000000004"]',0);
INSERT INTO "adapter_changes" VALUES(11,'1f0f29cb53234570bbc38241f653dfb7','beta','voice','[]',0);
INSERT INTO "adapter_changes" VALUES(12,'863459c00e364e428909317c403c48d5','beta','gone','[]',0);
INSERT INTO "adapter_changes" VALUES(13,'225d5dbb48784c699467357934a9e6f3','beta','gone','["0000000000000000000000000000000000000000000000000000000000000006"]',0);
INSERT INTO "adapter_changes" VALUES(14,'0e3750a7dbc64cb195a2747f55acc8d1','acme','voice','[]',1);
CREATE TABLE adapter_extras (
        tenant TEXT NOT NULL,
        name TEXT NOT NULL,
        number INTEGER NOT NULL,
        digest TEXT NOT NULL,
        chat_template TEXT,
        generation_config TEXT,
        PRIMARY KEY (tenant, name, number)
    ) STRICT;
INSERT INTO "adapter_extras" VALUES('acme','voice',2,'cbdeed636548dfc6443803290dc1c3f570fc345a36db048921f0de030e900e60','{{ messages }} ü',NULL);
INSERT INTO "adapter_extras" VALUES('acme','voice',3,'ddd1432b841e92985a3728544398e923f2c76c660c29b57df502b85f2d7cfef4','t','{"temperature": 0.5}');
CREATE TABLE adapter_names (
        tenant TEXT NOT NULL,
        name TEXT NOT NULL,
        last_number INTEGER NOT NULL,
        created_at REAL NOT NULL,
        PRIMARY KEY (tenant, name)
    ) STRICT;
INSERT INTO "adapter_names" VALUES('acme','voice',3,1790000000.25);
INSERT INTO "adapter_names" VALUES('acme','a.b-c',1,1790000005.25);
INSERT INTO "adapter_names" VALUES('acme','a_b',2,1790000006.25);
INSERT INTO "adapter_names" VALUES('beta','voice',1,1790000009.25);
CREATE TABLE adapter_registry (registry TEXT NOT NULL) STRICT;
INSERT INTO "adapter_registry" VALUES('c299c640ec83f3f3ccba5203864cc361');
CREATE TABLE adapter_reservations (
        reservation TEXT PRIMARY KEY,
        digest TEXT NOT NULL,
        expires_at REAL NOT NULL
    ) STRICT;
INSERT INTO "adapter_reservations" VALUES('3dbf987e6ecd4ec8992856ca5655ba64','ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff',1790003612.25);
CREATE TABLE adapter_versions (
        tenant TEXT NOT NULL,
        name TEXT NOT NULL,
        number INTEGER NOT NULL,
        digest TEXT NOT NULL,
        rank INTEGER NOT NULL,
        target_modules TEXT NOT NULL,
        num_bytes INTEGER NOT NULL,
        packed_bytes INTEGER,
        created_at REAL NOT NULL, blob_bytes INTEGER, template_bytes INTEGER, defaults_bytes INTEGER, extras_digest TEXT NOT NULL DEFAULT '',
        PRIMARY KEY (tenant, name, number)
    ) STRICT;
INSERT INTO "adapter_versions" VALUES('acme','voice',1,'0000000000000000000000000000000000000000000000000000000000000001',8,'["q_proj", "v_proj"]',4096,8192,1790000000.25,4300,NULL,NULL,'');
INSERT INTO "adapter_versions" VALUES('acme','voice',2,'0000000000000000000000000000000000000000000000000000000000000002',16,'["q_proj"]',9000,NULL,1790000001.25,NULL,17,NULL,'cbdeed636548dfc6443803290dc1c3f570fc345a36db048921f0de030e900e60');
INSERT INTO "adapter_versions" VALUES('acme','voice',3,'0000000000000000000000000000000000000000000000000000000000000003',8,'["q_proj", "v_proj"]',4096,8192,1790000002.25,4300,1,20,'ddd1432b841e92985a3728544398e923f2c76c660c29b57df502b85f2d7cfef4');
INSERT INTO "adapter_versions" VALUES('acme','a.b-c',1,'0000000000000000000000000000000000000000000000000000000000000001',8,'["q_proj", "v_proj"]',4096,8192,1790000005.25,4300,NULL,NULL,'');
INSERT INTO "adapter_versions" VALUES('acme','a_b',2,'0000000000000000000000000000000000000000000000000000000000000005',8,'["q_proj", "v_proj"]',4096,8192,1790000007.25,4300,NULL,NULL,'');
INSERT INTO "adapter_versions" VALUES('beta','voice',1,'0000000000000000000000000000000000000000000000000000000000000001',8,'["q_proj", "v_proj"]',4096,8192,1790000009.25,4300,NULL,NULL,'');
CREATE TABLE api_keys (
        key_id TEXT PRIMARY KEY,
        tenant TEXT NOT NULL REFERENCES tenants (name),
        digest BLOB NOT NULL,
        adapter TEXT,
        created_at INTEGER NOT NULL,
        revoked_at INTEGER
    ) STRICT;
INSERT INTO "api_keys" VALUES('EP6l4PDg','acme',X'978F099BD5F50492EA4BC7077A1BEE2BBFAC79153F3ECDA184F4D7475DAF7E2D','voice@prod',1795392146,NULL);
INSERT INTO "api_keys" VALUES('NWgUSzVx','acme',X'BDE896BC98553AF83EBD92142388820F9614578231B8A835F8B18EB240307D9A',NULL,1795392146,1795392146);
INSERT INTO "api_keys" VALUES('cmnoWCG6','beta',X'3CA9760A3E9A0E70EA9F72EC6B9213F3AF81EFB1A0745B56BA4DA3A4B58EBCAB','voice',1795392146,NULL);
CREATE TABLE schema_versions (component TEXT PRIMARY KEY, version INTEGER NOT NULL) STRICT;
INSERT INTO "schema_versions" VALUES('registry',6);
INSERT INTO "schema_versions" VALUES('tenancy',2);
CREATE TABLE tenants (
        name TEXT PRIMARY KEY,
        created_at INTEGER NOT NULL
    , weight REAL NOT NULL DEFAULT 1, min_pool_share REAL NOT NULL DEFAULT 0, max_pool_share REAL NOT NULL DEFAULT 1, priority INTEGER NOT NULL DEFAULT 0) STRICT;
INSERT INTO "tenants" VALUES('acme',1795392146,2.5,0.25,1.0,-3);
INSERT INTO "tenants" VALUES('beta',1795392146,1.0,0.0,1.0,0);
CREATE INDEX adapter_reservations_by_digest ON adapter_reservations (digest);
CREATE INDEX adapter_versions_by_digest ON adapter_versions (digest, tenant);
CREATE INDEX adapter_aliases_pinned ON adapter_aliases (tenant, name, alias) WHERE pinned;
CREATE INDEX adapter_versions_held ON adapter_versions
        (tenant, digest, blob_bytes, num_bytes, template_bytes, defaults_bytes);
CREATE INDEX api_keys_by_tenant ON api_keys (tenant, created_at);
DELETE FROM "sqlite_sequence";
INSERT INTO "sqlite_sequence" VALUES('adapter_changes',14);
COMMIT;
PRAGMA user_version = 1;
